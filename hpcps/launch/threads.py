"""How many threads a rank may use: its share of the cores that it may run on. Takes facts; sets nothing.

A launcher that binds each rank to cores of its own leaves it all of them; where ranks of a host may run on the same
cores, they share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ThreadShare", "given_threads", "share_of_cores"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadShare:
    """Threads for one rank.

    Args:
        number: threads, at least 1.
        reason: where the number comes from.
    """

    number: int
    reason: str


def given_threads(environ: Mapping[str, str]) -> int:
    """The number of threads that the user gave as OMP_NUM_THREADS; 0: none."""
    first = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() else 0


def share_of_cores(
    environ: Mapping[str, str], *, num_cores: int, cpus: Sequence[int], others: Sequence[Sequence[int]]
) -> ThreadShare:
    """Threads of a rank: what the user gave, else its cores divided among the ranks that may run on them.

    Args:
        environ: the environment.
        num_cores: cores (not hardware threads) that this rank may run on.
        cpus: processors that it may run on, as the system numbers them.
        others: those of each other rank of the same host.
    """
    given = given_threads(environ)
    if given:
        return ThreadShare(number=given, reason=f"OMP_NUM_THREADS={environ['OMP_NUM_THREADS']}")
    mine = set(cpus)
    num_ranks = 1 + sum(not mine.isdisjoint(each) for each in others)
    whose = "its own" if num_ranks == 1 else f"shared by {num_ranks} ranks"
    return ThreadShare(number=max(1, num_cores // num_ranks), reason=f"{num_cores} cores, {whose}")

"""The links between workers and servers, as workers measure them while they train: what is told of them, and when."""

from __future__ import annotations

from collections.abc import Sequence

from hpcps.errors import ProtocolError
from hpcps.protocol.speeds import Report

__all__ = ["Links"]

NUMBERS = ("push_latency_s", "push_bytes_per_s", "pull_latency_s", "pull_bytes_per_s")
"""What a worker tells of its link to one server, in this order; 0: unknown."""

MOVED = 1.5
"""A rate so many times the one told last, or its inverse, is worth an event."""


class Links:
    """Links of a job.

    Args:
        report: told of a worker's links when they are known, and when a rate is another one (``links``).
    """

    def __init__(self, *, report: Report) -> None:
        self._report = report
        self._told: dict[int, Sequence[float]] = {}
        """By world rank: the rates that the last event had."""

    def take(self, rank: int, numbers: Sequence[float]) -> None:
        """Take in what a worker tells.

        Args:
            rank: world rank of the worker.
            numbers: four for each server, as ``NUMBERS`` says; none: nothing new.

        Raises:
            ProtocolError: another count of numbers.
        """
        if len(numbers) % len(NUMBERS):
            raise ProtocolError(
                f"cannot take in the links of rank {rank}: got {len(numbers)} numbers, need {len(NUMBERS)} a server;"
                " run the same hpcps on every rank",
                rank=rank,
            )
        rates = numbers[1::2]
        told = self._told.get(rank, [0.0] * len(rates))
        if rates and any(_moved(before, now) for before, now in zip(told, rates, strict=True)):
            self._told[rank] = rates
            columns = {name: list(numbers[at :: len(NUMBERS)]) for at, name in enumerate(NUMBERS)}
            self._report("links", {"worker": rank, **columns})


def _moved(before: float, now: float) -> bool:
    return now > 0 and not before / MOVED < now < before * MOVED

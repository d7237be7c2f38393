"""What a server knows of one shard besides its arrays, as it goes to another server. Holds no frames and no arrays.

Times are told as ages, because servers' clocks differ. What a server has received of a group needs no word of its own:
it is what the window holds of it, else what is settled. Frames beyond that go to the new server as frames.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcps.errors import ProtocolError

__all__ = ["KeyState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyState:
    """Versions, clocks and the open window of a shard.

    Args:
        version: of the shard, -1 before its first values.
        generation: the grouping that the giving server knows.
        num_groups: its groups, 0 before the first push.
        since_clock: first clock of that generation.
        settled: pairs (group, clock): newest clock of each group that was applied or refused.
        window: pairs (group, clock): the push of each group in the open window.
        weight: their weight.
        decayed: their weight after the decay of late ones.
        share_frac: their part of a full batch.
        window_age_s: seconds since the window opened, 0 without one.
        missed: groups that the last window closed with.
        missed_age_s: seconds since that window opened.
        offsets_s: last arrival offsets, oldest first.
        ended: triples (generation, group, clock): ends of data that the giving server has heard of.
    """

    version: int
    generation: int
    num_groups: int
    since_clock: int
    settled: list[list[int]]
    window: list[list[int]]
    weight: float
    decayed: float
    share_frac: float
    window_age_s: float
    missed: list[int]
    missed_age_s: float
    offsets_s: list[float] = field(default_factory=list)
    ended: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        amounts = (self.weight, self.decayed, self.share_frac, self.window_age_s, self.missed_age_s)
        _need(self.version >= -1, "version", self.version)
        _need(self.generation >= 0, "generation", self.generation)
        _need(self.num_groups >= 0, "num_groups", self.num_groups)
        _need(self.since_clock >= 1, "since_clock", self.since_clock)
        for name, pairs in (("settled", self.settled), ("window", self.window)):
            _need(all(len(pair) == 2 for pair in pairs), name, pairs)
            _need(self._are_groups([group for group, _ in pairs]), name, pairs)
            _need(all(clock >= 0 for _, clock in pairs), name, pairs)
        _need(self._are_groups(self.missed), "missed", self.missed)
        for amount in (*amounts, *self.offsets_s):
            _need(math.isfinite(amount) and amount >= 0, "a weight or time", amount)
        _need(all(len(end) == 3 and min(end) >= 0 for end in self.ended), "ended", self.ended)

    def _are_groups(self, groups: Sequence[int]) -> bool:
        return len(set(groups)) == len(groups) and all(0 <= group < self.num_groups for group in groups)


def _need(fine: bool, field_name: str, got: object) -> None:
    if not fine:
        raise ProtocolError(
            f"cannot take over a shard: its state has {field_name} {got!r}, which is out of range; run the same"
            " hpcps on every rank"
        )

"""Batches of a loader: one cursor a pass, one list of batches a group. Decides no share and no grouping.

A pass is one epoch of one loader. A group's batches of a pass stand in a list; the first member that asks
for a batch makes it, the others get their part of the same one. Groups draw from one cursor, so a faster
group takes more, and every sample of an epoch is handed out exactly once.

A new grouping begins, for each old group, at the first batch that nobody has drawn. So members of one new
group begin it at different batches of their own count: a batch's place in its group's list is its index
less the worker's first one of that generation.

    worker 1   old 0 1 2 3 4 | 5 6 7           base 5      place in the new group   0 1 2
    worker 2   old 0 1 2     | 3 4 5           base 3                               0 1 2
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hpcps.errors import ProtocolError
from hpcps.plan import Group, Grouping
from hpcps.policy.partition import equal_shares
from hpcps.protocol.costs import CostTerms

__all__ = ["Batch", "Generation", "Loader", "Pass", "Stream"]


@dataclass(slots=True, kw_only=True)
class Batch:
    """One batch of one group.

    Args:
        starts: first sample of each member.
        counts: samples of each member.
        num_samples: samples of all of them.
        num_idle: members without a sample.
        share_frac: the group's part of a full global batch.
        terms: where samples have costs, by what the members find their own among the group's.
    """

    starts: dict[int, int]
    counts: dict[int, int]
    num_samples: int
    num_idle: int
    share_frac: float
    terms: CostTerms | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A grouping, and the first batch of it.

    Args:
        grouping: the groups.
        number: pass in which it begins.
        bases: first batch of each worker in that pass; 0 where a worker is not named.
    """

    grouping: Grouping
    number: int = 0
    bases: Mapping[int, int] = field(default_factory=dict)

    def base(self, rank: int, number: int) -> int:
        """First batch of a worker in a pass."""
        return self.bases.get(rank, 0) if number == self.number else 0

    def holds(self, rank: int, number: int, index: int) -> bool:
        """True if a worker's batch is of this generation or of a later one."""
        return (number, index) >= (self.number, self.bases.get(rank, 0))


@dataclass(slots=True)
class Stream:
    """Batches of one group in one pass; those that all members have are forgotten."""

    members: tuple[int, ...]
    batches: deque[Batch] = field(default_factory=deque)
    """Those that some member still has to get."""
    first: int = 0
    """Place of the first of them."""
    given: dict[int, int] = field(default_factory=dict)
    """Batches that each member got."""
    ended: bool = False
    """No batch comes any more: no sample is left, or a member broke the pass off."""
    terms: CostTerms | None = None
    """Those of the last batch."""
    head_start: int = 0
    """Batches that count as done before its first: a group that comes late is not behind."""
    done: dict[int, int] = field(default_factory=dict)
    """Batches that each member is through with."""

    @property
    def num_drawn(self) -> int:
        """Batches of the group so far."""
        return self.first + len(self.batches)

    @property
    def progress(self) -> int:
        """Batches that the whole group is through with."""
        return self.head_start + min(self.done.get(rank, 0) for rank in self.members)

    def give(self, rank: int, place: int) -> Batch | None:
        """A member's part of the batch at a place; None past the last one.

        Raises:
            ProtocolError: that is not its next one.
        """
        if place >= self.num_drawn:
            return None
        due = self.given.get(rank, 0)
        if place != due:
            raise ProtocolError(
                f"cannot give rank {rank} batch {place} of its group: it is out of turn, need {due}; run the same hpcps"
                " on every rank",
                rank=rank,
            )
        batch = self.batches[place - self.first]
        self.given[rank] = place + 1
        if place == self.first and len(self.given) == len(self.members):
            for _ in range(min(self.given.values()) - self.first):
                self.batches.popleft()
                self.first += 1
        return batch


@dataclass(slots=True)
class Pass:
    """One epoch of one loader."""

    num_samples: int
    number: int = -1
    """Place among all passes that are trained on, -1: none."""
    cursor: int = 0
    """Samples handed out."""
    streams: dict[tuple[int, int], Stream] = field(default_factory=dict)
    """By (generation, group)."""

    @property
    def exhausted(self) -> bool:
        """True once every sample is handed out."""
        return self.cursor >= self.num_samples

    def stream(self, generation: int, group: Group, *, paused: Collection[int]) -> Stream:
        """Batches of a group; one that comes late counts as far as the slowest of the others."""
        name = (generation, group.index)
        if name not in self.streams:
            head_start = min(self._others(name, paused), default=0)
            self.streams[name] = Stream(members=group.workers, head_start=head_start)
        return self.streams[name]

    def may_draw(self, generation: int, group: Group, *, ahead: int, paused: Collection[int]) -> bool:
        """True unless a group's next batch is more than some ahead of the slowest other group in the pass.

        Groups that have ended or paused do not count; without samples left nobody is held back.

        Args:
            generation: generation of the group.
            group: the group.
            ahead: batches; 0: no bound.
            paused: workers that wait at a barrier.
        """
        name = (generation, group.index)
        stream = self.streams[name]
        others = self._others(name, paused) if ahead > 0 and not self.exhausted else []
        return not others or stream.head_start + stream.num_drawn <= min(others) + ahead

    def even_out(self) -> None:
        """Count every group as far as the furthest: a bound that begins now holds nobody up for what lies behind."""
        for name, stream in self.streams.items():
            drawn = [each.head_start + each.num_drawn for other, each in self.streams.items() if other[0] == name[0]]
            stream.head_start = max(drawn) - stream.num_drawn

    def _others(self, name: tuple[int, int], paused: Collection[int]) -> list[int]:
        return [
            stream.progress
            for (generation, group), stream in self.streams.items()
            if generation == name[0]
            and group != name[1]
            and not (stream.ended or any(rank in paused for rank in stream.members))
        ]

    def forget(self, generation: int) -> None:
        """Drop the batches of generations older than this one."""
        for name in [name for name in self.streams if name[0] < generation]:
            del self.streams[name]


@dataclass(slots=True)
class Loader:
    """One loader of all workers."""

    num_samples: int
    global_batch: int
    trains: bool
    costs: str = ""
    """Digest of the samples' costs or features; empty: all cost the same."""
    shares: tuple[int, ...] = ()
    """Each worker's part of a full batch; empty until the speeds are known."""
    passes: dict[int, Pass] = field(default_factory=dict)
    """By epoch."""
    newest: dict[int, int] = field(default_factory=dict)
    """Newest epoch that each worker asked for; it asks for no older one again."""

    def enter(self, rank: int, epoch: int, *, num_workers: int) -> Pass:
        """A worker asks for an epoch: those that nobody will ask for again are forgotten."""
        if self.newest.get(rank, -1) < epoch:
            self.newest[rank] = epoch
            oldest = min(self.newest.values()) if len(self.newest) == num_workers else 0
            for old in [old for old in self.passes if old < oldest]:
                del self.passes[old]
        return self.passes.setdefault(epoch, Pass(self.num_samples))

    def draw(self, stream: Stream, wanted: Mapping[int, int], *, epoch: int, least: int) -> bool:
        """Take a group's next batch off the epoch's cursor; the tail is shared out like a full batch.

        Args:
            stream: gets the batch, or its end.
            wanted: samples of each member in a full batch, in rank order.
            epoch: epoch of the batch.
            least: least share of a member; from 2 on, a tail too small for it joins the batch before.

        Returns:
            False if no sample is left.
        """
        pass_ = self.passes[epoch]
        left = self.num_samples - pass_.cursor
        if left <= 0:
            stream.ended = True
            return False
        members, shares = tuple(wanted), list(wanted.values())
        total = sum(shares)
        if total == 0:
            shares, total = list(equal_shares(len(members), len(members))), len(members)
        too_few_after = least > 1 and 0 < left - total < least * len(members)
        counts = shares if total <= left and not too_few_after else _share_tail(shares, left, least=least)
        starts, position = [], pass_.cursor
        for count in counts:
            starts.append(position)
            position += count
        stream.batches.append(
            Batch(
                starts=dict(zip(members, starts, strict=True)),
                counts=dict(zip(members, counts, strict=True)),
                num_samples=position - pass_.cursor,
                num_idle=sum(count == 0 for count in counts),
                share_frac=min(1.0, total / self.global_batch),
            )
        )
        pass_.cursor = position
        return True


def _share_tail(wanted: Sequence[int], total: int, *, least: int) -> list[int]:
    """Another number of samples in the same proportion, with the least share for all where there is enough."""
    floor = least if total >= least * len(wanted) else 0
    spare = [max(0, count - floor) for count in wanted]
    if sum(spare) == 0:
        spare = [1] * len(wanted)
    return [floor + extra for extra in _shrink(spare, total - floor * len(wanted))]


def _shrink(wanted: Sequence[int], total: int) -> list[int]:
    """So many samples in the same proportion: whole numbers by largest remainder, ties to the first."""
    whole = sum(wanted)
    exact = [n * total / whole for n in wanted]
    counts = [int(x) for x in exact]
    order = sorted(range(len(wanted)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts

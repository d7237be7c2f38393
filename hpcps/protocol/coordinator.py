"""Who gets which samples: one cursor an epoch, one share a worker, one grouping for all.

Runs on the first server. Every decision is taken here once and told to the workers as orders, so no
two ranks can decide differently. Reads no clock; the workers report how long their steps took.

A group's batches of an epoch stand in a list; the first member that asks for a batch makes it, the
others get their part of the same one. Groups draw from one cursor, so a faster group takes more, and
every sample of an epoch is handed out exactly once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcps.config import RunConfig
from hpcps.errors import DataError, PlanError
from hpcps.plan import Grouping
from hpcps.policy.capacity import TimedStep
from hpcps.policy.grouping import GroupWorkers
from hpcps.policy.partition import Partition, equal_shares, ideal_speedup, warmup_shares
from hpcps.protocol.control import BarrierEnter, BarrierLeave, LoaderOpen, Order, OrderRequest
from hpcps.protocol.speeds import Report, Speeds

__all__ = ["Coordinator", "Progress", "Reply"]

Reply = tuple[int, Order | BarrierLeave]
"""World rank to send to, and the message."""


@dataclass(slots=True)
class _Batch:
    """One batch of one group: the first sample of each member and its count."""

    starts: dict[int, int]
    counts: dict[int, int]
    share_frac: float


@dataclass(slots=True)
class _Stream:
    """Batches of one group in one epoch of one loader, from batch ``base`` on."""

    base: int
    batches: list[_Batch] = field(default_factory=list)
    ended: bool = False


@dataclass(slots=True)
class _Loader:
    num_samples: int
    global_batch: int
    trains: bool
    shares: tuple[int, ...] = ()
    """Each worker's part of a full batch; empty until the speeds are known."""
    cursors: dict[int, int] = field(default_factory=dict)
    streams: dict[tuple[int, int, int], _Stream] = field(default_factory=dict)
    """By (generation, group, epoch)."""
    newest: dict[int, int] = field(default_factory=dict)
    """Newest epoch that each worker asked for; it asks for no older one again."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """What the progress line is made of; counts since the start."""

    num_samples: int = 0
    epoch: int = 0
    num_epochs: int = 0
    epoch_total: int = 0
    ideal_samples_per_s: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    s_star: float = 1.0
    slowest: int = -1
    staleness: int = 0


class Coordinator:
    """State of all loaders of a job.

    Args:
        config: the run's settings.
        workers: world ranks of the workers, ascending.
        report: told of every decision.
    """

    def __init__(self, config: RunConfig, workers: Sequence[int], *, report: Report) -> None:
        self._config = config
        self._workers = tuple(workers)
        self._report = report
        capacity = config.capacity if config.heterogeneous else dataclasses.replace(config.capacity, prior=())
        self._speeds = Speeds(capacity, workers, report=report)
        self._grouping_policy = GroupWorkers(config.sync_mode, config.sync_group_size)
        self._loaders: dict[int, _Loader] = {}
        self._barriers: dict[int, set[int]] = {}
        self._boundaries = self._first_groupings()
        self._regrouped_loader = -1
        self._num_orders = 0
        self._told = dict.fromkeys(self._workers, 0)
        self.progress = Progress()

    @property
    def grouping(self) -> Grouping:
        """The grouping in force."""
        return self._boundaries[-1][2]

    def on_loader(self, message: LoaderOpen) -> None:
        """A worker opened a loader.

        Raises:
            DataError: workers disagree on its size or batch: their datasets differ. Or it is a second one to train on
                while the groups are still to be found: the change would tear the epoch of one of the two.
        """
        loader = _Loader(message.num_samples, message.global_batch, message.trains)
        known = self._loaders.setdefault(message.loader, loader)
        if (known.num_samples, known.global_batch) != (message.num_samples, message.global_batch):
            raise DataError(
                f"cannot share out loader {message.loader}: rank {message.rank} has {message.num_samples} samples"
                f" and global batch {message.global_batch}, others {known.num_samples} and {known.global_batch};"
                " build the same dataset on every worker, from one seed",
                rank=message.rank,
            )
        cap = self._config.partition.max_share
        if message.trains and cap and message.global_batch > cap * len(self._workers):
            raise PlanError(
                f"cannot share out loader {message.loader}: {len(self._workers)} workers of at most {cap} samples hold"
                f" {cap * len(self._workers)}, the global batch is {message.global_batch}; raise partition.max_share or"
                " lower global_batch",
                rank=message.rank,
            )
        if message.trains:
            others = [index for index, each in self._loaders.items() if each.trains and index != message.loader]
            if others and self._regroups_later:
                raise DataError(
                    f"cannot train on loader {message.loader} too: loader {others[0]} is still measuring speeds to form"
                    " groups; train on one loader, or give capacity.prior",
                    rank=message.rank,
                )
            self.progress.epoch_total = message.num_samples

    def on_request(self, request: OrderRequest) -> list[Reply]:
        """A worker wants a batch and reports its finished steps."""
        self._take_report(request)
        loader = self._loaders[request.loader]
        self._maybe_regroup(loader, request)
        loader.newest[request.rank] = request.epoch
        grouping = self._grouping_at(loader, request)
        group = grouping.group_of(request.rank)
        stream_key = (grouping.generation, group.index, request.epoch)
        stream = loader.streams.get(stream_key)
        if stream is None:
            stream = loader.streams[stream_key] = _Stream(base=request.index)
            self._forget(loader, group.workers)
        position = request.index - stream.base
        if position >= len(stream.batches) and not stream.ended:
            self._draw(loader, stream, group.workers, epoch=request.epoch)
        end = position >= len(stream.batches)
        told, self._told[request.rank] = self._told[request.rank], grouping.generation
        batch = _Batch({}, {}, 0.0) if end else stream.batches[position]
        order = Order(
            loader=request.loader,
            epoch=request.epoch,
            index=request.index,
            end=end,
            start=batch.starts.get(request.rank, 0),
            count=batch.counts.get(request.rank, 0),
            group_count=sum(batch.counts.values()),
            num_idle=sum(count == 0 for count in batch.counts.values()),
            share_frac=batch.share_frac,
            generation=grouping.generation,
            groups=[] if told == grouping.generation else [list(each.workers) for each in grouping.groups],
        )
        return [(request.rank, order)]

    def on_barrier(self, message: BarrierEnter) -> list[Reply]:
        """A worker arrived at a barrier; the last one opens it."""
        arrived = self._barriers.setdefault(message.index, set())
        arrived.add(message.rank)
        if len(arrived) < len(self._workers):
            return []
        del self._barriers[message.index]
        return [(rank, BarrierLeave(index=message.index)) for rank in self._workers]

    def _first_groupings(self) -> list[tuple[int, int, Grouping]]:
        """All begin as one group; where the groups are known without measuring, they come before the first batch."""
        together = GroupWorkers("sync", 0).decide(dict.fromkeys(self._workers, 1.0), generation=0).grouping
        boundaries = [(0, 0, together)]
        mode = self._config.sync_mode
        if mode == "async" or (mode == "hybrid" and (self._speeds.known or not self._config.heterogeneous)):
            speeds = self._speeds.by_rank or dict.fromkeys(self._workers, 1.0)
            boundaries.append((0, 0, self._decide_grouping(speeds)))
        return boundaries

    @property
    def _regroups_later(self) -> bool:
        """True while warm-up in hybrid mode goes on."""
        return self._config.sync_mode == "hybrid" and len(self._boundaries) == 1

    def _decide_grouping(self, speeds: dict[int, float]) -> Grouping:
        decision = self._grouping_policy.decide(speeds, generation=1)
        groups = [list(group.workers) for group in decision.grouping.groups]
        self._report("grouping", {"generation": 1, "groups": groups, "reason": decision.reason})
        return decision.grouping

    def _grouping_at(self, loader: _Loader, request: OrderRequest) -> Grouping:
        """The grouping of a batch; evaluation is shared out to all, so that no change of grouping tears its epoch."""
        if not loader.trains:
            return self._boundaries[0][2]
        for from_epoch, from_index, grouping in reversed(self._boundaries):
            if request.loader != self._regrouped_loader or (request.epoch, request.index) >= (from_epoch, from_index):
                return grouping
        return self._boundaries[0][2]

    def _forget(self, loader: _Loader, members: tuple[int, ...]) -> None:
        """Drop the epochs that no member of a group will ask for again."""
        oldest = min(loader.newest.get(rank, 0) for rank in members)
        for generation, group, epoch in list(loader.streams):
            if epoch < oldest and self._members(generation, group) == members:
                del loader.streams[generation, group, epoch]

    def _members(self, generation: int, group: int) -> tuple[int, ...]:
        grouping = next(each for _, _, each in self._boundaries if each.generation == generation)
        return grouping.groups[group].workers

    def _take_report(self, request: OrderRequest) -> None:
        progress = self.progress
        pairs = list(zip(request.timed[::2], request.timed[1::2], strict=True))
        progress.num_samples += request.num_samples
        for name, total, weight in zip(request.logged, request.sums, request.weights, strict=True):
            progress.sums[name] = progress.sums.get(name, 0.0) + total
            progress.weights[name] = progress.weights.get(name, 0.0) + weight
        progress.epoch = max(progress.epoch, request.epoch)
        progress.num_epochs = max(progress.num_epochs, request.num_epochs)
        progress.staleness = max(progress.staleness, request.staleness)
        if self._config.heterogeneous:
            steps = [TimedStep(num_samples=int(n), seconds=seconds) for n, seconds in pairs if n > 0]
            if self._speeds.take(request.rank, steps):
                for loader in self._loaders.values():
                    self._share_out(loader)

    def _share_out(self, loader: _Loader) -> None:
        """Share out a loader's batch anew, once every worker's speed is known."""
        if not loader.trains or not self._speeds.known:
            return
        fits, batch = self._speeds.fits, loader.global_batch
        band = max(self._config.capacity.dead_band_frac, self._speeds.noise_frac)
        current = loader.shares or equal_shares(batch, len(self._workers))
        shares = Partition(self._config.partition, min(band, 0.99)).decide(fits, batch, current=current)
        times = [fit.seconds(n) for fit, n in zip(fits, shares.counts, strict=True)]
        progress = self.progress
        progress.s_star = ideal_speedup(fits, batch, config=self._config.partition)
        progress.ideal_samples_per_s = batch / max(times) if max(times) > 0 else 0.0
        progress.slowest = self._workers[times.index(max(times))]
        workers = list(self._workers)
        curves = {"fixed_s": [fit.fixed_s for fit in fits], "per_sample_s": [fit.per_sample_s for fit in fits]}
        self._report("capacity", {"workers": workers, **curves, "s_star": progress.s_star})
        if shares.counts != loader.shares:
            loader.shares = shares.counts
            fields = {"step": self._num_orders, "workers": workers, "counts": list(shares.counts)}
            self._report("shares", {**fields, "reason": shares.reason})

    def _maybe_regroup(self, loader: _Loader, request: OrderRequest) -> None:
        """The end of warm-up in hybrid mode: one group becomes groups of like speed, at a batch nobody has yet."""
        if not loader.trains or not self._regroups_later or not self._speeds.measured:
            return
        grouping = self._boundaries[0][2]
        stream = loader.streams.get((grouping.generation, 0, request.epoch))
        if stream is not None and (request.index < stream.base + len(stream.batches) or stream.ended):
            return
        speeds = self._speeds.by_rank
        self._regrouped_loader = request.loader
        self._boundaries.append((request.epoch, request.index, self._decide_grouping(speeds)))

    def _current_shares(self, loader: _Loader, index: int) -> tuple[int, ...]:
        """Each worker's part of a full batch, in rank order."""
        num_workers = len(self._workers)
        if not loader.trains or not self._config.heterogeneous:
            return equal_shares(loader.global_batch, num_workers)
        if not loader.shares:
            self._share_out(loader)
        cap = self._config.partition.max_share
        return loader.shares or warmup_shares(loader.global_batch, num_workers, index, max_share=cap)

    def _draw(self, loader: _Loader, stream: _Stream, members: tuple[int, ...], *, epoch: int) -> None:
        """Take the group's next batch off the epoch's cursor; the tail is shared out like a full batch.

        Where the script asks for a least share, a tail too small for it joins the batch before.
        """
        shares = dict(zip(self._workers, self._current_shares(loader, stream.base + len(stream.batches)), strict=True))
        wanted = [shares[rank] for rank in members]
        cursor = loader.cursors.get(epoch, 0)
        left = loader.num_samples - cursor
        if left <= 0:
            stream.ended = True
            return
        total = sum(wanted)
        if total == 0:
            wanted, total = list(equal_shares(len(members), len(members))), len(members)
        least = self._config.partition.min_share
        too_few_after = least > 1 and 0 < left - total < least * len(members)
        counts = wanted if total <= left and not too_few_after else _share_tail(wanted, left, least=least)
        starts, position = [], cursor
        for count in counts:
            starts.append(position)
            position += count
        loader.cursors[epoch] = position
        self._num_orders += 1
        stream.batches.append(
            _Batch(
                dict(zip(members, starts, strict=True)),
                dict(zip(members, counts, strict=True)),
                min(1.0, total / loader.global_batch),
            )
        )


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

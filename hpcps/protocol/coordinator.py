"""Who gets which samples: one cursor an epoch, one share a worker, one grouping for all.

Runs on the first server. Every decision is taken here once and told to the workers as orders, so no
two ranks can decide differently. Reads no clock; the workers report how long their steps took.
Batches and the cursor are in ``streams.py``, changes of groups in ``regrouping.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcps.config import RunConfig
from hpcps.errors import DataError, PlanError, ProtocolError
from hpcps.plan import Grouping
from hpcps.policy.partition import Partition, equal_shares, least_cap, warmup_shares
from hpcps.policy.speed_classes import WorkerFacts
from hpcps.protocol.control import BarrierEnter, BarrierLeave, LoaderOpen, Order, OrderRequest
from hpcps.protocol.costs import Costs, CostTerms
from hpcps.protocol.links import Links
from hpcps.protocol.regrouping import Regrouping
from hpcps.protocol.speeds import Report, Speeds
from hpcps.protocol.streams import Batch, Generation, Loader, Pass, Stream

__all__ = ["Coordinator", "Progress", "Reply"]

Reply = tuple[int, Order | BarrierLeave]
"""World rank to send to, and the message."""

TOLD_S_STAR_FRAC = 0.01
"""A change of S* that is worth an event where the shares stay."""

_NONE = Batch(starts={}, counts={}, num_samples=0, num_idle=0, share_frac=0.0)


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
        self._links = Links(report=report)
        self._regrouping = Regrouping(config, workers, report=report)
        self._everyone = Generation(self._regrouping.grouping)
        self._loaders: dict[int, Loader] = {}
        self._costs = Costs(config.capacity, workers, report=report)
        self._told_terms: dict[tuple[int, int], CostTerms] = {}
        """By loader and world rank: those of its last order."""
        self._barriers: dict[int, set[int]] = {}
        self._ssp = config.staleness.ssp
        self._waiting: list[OrderRequest] = []
        """Requests that are not answered yet: their groups are too far ahead."""
        self._num_orders = 0
        self._told_s_star = 1.0
        self.progress = Progress()

    @property
    def grouping(self) -> Grouping:
        """The newest grouping; some workers may still have to finish batches of the one before."""
        return self._regrouping.grouping

    def on_loader(self, message: LoaderOpen) -> None:
        """A worker opened a loader.

        Raises:
            DataError: workers disagree on its size or batch: their datasets differ.
        """
        loader = Loader(message.num_samples, message.global_batch, message.trains, costs=message.costs)
        known = self._loaders.setdefault(message.loader, loader)
        if (known.num_samples, known.global_batch) != (message.num_samples, message.global_batch):
            raise DataError(
                f"cannot share out loader {message.loader}: rank {message.rank} has {message.num_samples} samples"
                f" and global batch {message.global_batch}, others {known.num_samples} and {known.global_batch};"
                " build the same dataset on every worker, from one seed",
                rank=message.rank,
            )
        self._costs.on_loader(message, known.costs)
        if message.trains:
            self._check_caps(message)
            self.progress.epoch_total = message.num_samples
            known_speeds = self._speeds.known or not self._config.heterogeneous
            self._regrouping.begin(lambda: self._facts(known), known=known_speeds)

    def on_request(self, request: OrderRequest) -> list[Reply]:
        """A worker wants a batch and reports its finished steps; a worker that was kept waiting may get one now.

        Raises:
            DataError: the script reads two loaders at once while groups are still to be found.
        """
        loader = self._loaders.get(request.loader)
        if loader is None:
            raise ProtocolError(
                f"cannot give rank {request.rank} a batch of loader {request.loader}: it never opened that one; run"
                " the same hpcps on every rank",
                rank=request.rank,
            )
        self._take_report(request)
        pass_ = loader.enter(request.rank, request.epoch, num_workers=len(self._workers))
        if loader.trains:
            self._regrouping.enter(request.rank, pass_, batches_per_step=request.batches_per_step, held=request.held)
            if self._regrouping.consider(lambda: self._facts(loader), measured=self._speeds.measured):
                self._share_out(loader)
            if request.leaves:
                self._end_group(request, pass_)
        self._waiting.append(request)
        return self._answer_all()

    def set_ssp(self, steps: int) -> list[Reply]:
        """Bound from now on how many steps a group may be ahead of the slowest one.

        Args:
            steps: the bound; 0: none. ``staleness.ssp`` is the one at the start.

        A bound that begins, or gets narrower, counts from here on: a group that is far ahead would else wait until the
        slowest has made up for it, and the slowest perhaps for that group's part in a window.

        Returns:
            Orders of workers that need not wait any more.
        """
        if steps and not 0 < self._ssp <= steps:
            self._even_out()
        self._ssp = steps
        return self._answer_all()

    def set_together(self, together: bool) -> None:
        """Make one group of all workers at the next safe point, or form groups again as the mode says."""
        self._regrouping.want_together(together)

    def _even_out(self) -> None:
        for loader in self._loaders.values():
            for pass_ in loader.passes.values():
                pass_.even_out()

    def _answer_all(self) -> list[Reply]:
        """Answer all who need not wait; an answer may end the wait of others."""
        replies: list[Reply] = []
        answered = True
        while answered and self._waiting:
            waiting, self._waiting, answered = self._waiting, [], False
            for request in waiting:
                order = self._answer(request)
                if order is None:
                    self._waiting.append(request)
                else:
                    replies.append((request.rank, order))
                    answered = True
        return replies

    def _answer(self, request: OrderRequest) -> Order | None:
        """A worker's part of a batch; None while its group has to wait for slower ones."""
        loader = self._loaders[request.loader]
        pass_ = loader.passes[request.epoch]
        rank, number = request.rank, pass_.number
        place = self._regrouping.at(rank, number, request.index) if loader.trains else self._everyone
        generation, group = place.grouping.generation, place.grouping.group_of(rank)
        paused = set().union(*self._barriers.values())
        stream = pass_.stream(generation, group, paused=paused)
        position = request.index - place.base(rank, number)
        stream.done[rank] = max(stream.done.get(rank, 0), request.done - place.base(rank, number))
        if position >= stream.num_drawn and not stream.ended:
            in_turn = position == stream.num_drawn or pass_.exhausted
            ahead = self._ssp + request.held if self._ssp else 0
            if not in_turn or not pass_.may_draw(generation, group, ahead=ahead, paused=paused):
                return None
            self._draw(loader, stream, group.workers, epoch=request.epoch)
        return self._order(request, stream.give(rank, position), place.grouping)

    def _end_group(self, request: OrderRequest, pass_: Pass) -> None:
        """A worker breaks a pass off, so its group gets no more of it; what is drawn is to be stepped through."""
        grouping = self._regrouping.newest_in(pass_.number).grouping
        stream = pass_.stream(grouping.generation, grouping.group_of(request.rank), paused=())
        stream.ended = True

    def _order(self, request: OrderRequest, batch: Batch | None, grouping: Grouping) -> Order:
        """A worker's part of a batch; None: the epoch is over for its group."""
        end = batch is None
        trains = self._loaders[request.loader].trains
        news = trains and self._regrouping.tell(request.rank, grouping.generation, end=end)
        batch = batch or _NONE
        order = Order(
            loader=request.loader,
            epoch=request.epoch,
            index=request.index,
            end=end,
            start=batch.starts.get(request.rank, 0),
            count=batch.counts.get(request.rank, 0),
            group_count=batch.num_samples,
            num_idle=batch.num_idle,
            share_frac=batch.share_frac,
            generation=grouping.generation,
            groups=[list(each.workers) for each in grouping.groups] if news else [],
        )
        if batch.terms is None:
            return order
        name = request.loader, request.rank
        known, self._told_terms[name] = self._told_terms.get(name), batch.terms
        start, member = next(iter(batch.starts.values())), list(batch.counts).index(request.rank)
        return batch.terms.told(order, start=start, member=member, again=batch.terms is known)

    def on_barrier(self, message: BarrierEnter) -> list[Reply]:
        """A worker arrived at a barrier; the last one opens it. Nobody is held back for who waits there."""
        arrived = self._barriers.setdefault(message.index, set())
        arrived.add(message.rank)
        self._regrouping.on_barrier(message.rank)
        replies: list[Reply] = []
        if len(arrived) == len(self._workers):
            del self._barriers[message.index]
            self._even_out()
            replies += [(rank, BarrierLeave(index=message.index)) for rank in self._workers]
        return replies + self._answer_all()

    def _facts(self, loader: Loader) -> dict[int, WorkerFacts]:
        """What groups are formed by; equal where speeds are not known."""
        shares = self._current_shares(loader, 0)
        if not self._speeds.known:
            return {rank: WorkerFacts(speed=1.0) for rank in self._workers}
        return {
            rank: WorkerFacts.of(fit, count)
            for rank, fit, count in zip(self._workers, self._speeds.fits, shares, strict=True)
        }

    def _take_report(self, request: OrderRequest) -> None:
        progress = self.progress
        progress.num_samples += request.num_samples
        for name, total, weight in zip(request.logged, request.sums, request.weights, strict=True):
            progress.sums[name] = progress.sums.get(name, 0.0) + total
            progress.weights[name] = progress.weights.get(name, 0.0) + weight
        progress.epoch = max(progress.epoch, request.epoch)
        progress.num_epochs = max(progress.num_epochs, request.num_epochs)
        progress.staleness = max(progress.staleness, request.staleness)
        self._links.take(request.rank, request.links)
        steps, renewed = self._costs.take(request)
        if self._config.heterogeneous:
            moved = self._speeds.take(
                request.rank,
                steps,
                link_s=request.link_s,
                cpu_wait_frac=request.cpu_wait_frac,
                max_samples=request.max_samples,
            )
            if renewed:
                self._speeds.restart_units(self._costs.steps())
            if moved or renewed:
                self._regrouping.on_speeds()
                for loader in self._loaders.values():
                    self._share_out(loader)

    def _share_out(self, loader: Loader) -> None:
        """Share out a loader's batch anew, once every worker's speed is known.

        With several groups each waits for its own exchange, so the seconds of link that a group has more than the
        others count among its members' fixed ones. In one group of all, every member waits for the slowest link
        whatever its share, so they do not; nor where the exchange runs beside the next step.
        """
        if not loader.trains or not self._speeds.known:
            return
        batch = loader.global_batch
        groups = [group.workers for group in self.grouping.groups] if self._config.overlap == 0 else []
        fits, caps = self._speeds.fits_in(groups), self._caps(batch)
        band = max(self._config.capacity.dead_band_frac, self._speeds.noise_frac)
        current = loader.shares or equal_shares(batch, len(self._workers))
        shares = Partition(self._config.partition, min(band, 0.99)).decide(fits, batch, current=current, caps=caps)
        times = [fit.seconds(n) for fit, n in zip(fits, shares.counts, strict=True)]
        progress = self.progress
        progress.s_star = shares.speedup
        progress.ideal_samples_per_s = batch / max(times) if max(times) > 0 else 0.0
        progress.slowest = self._workers[times.index(max(times))]
        workers = list(self._workers)
        changed = shares.counts != loader.shares
        if changed or abs(progress.s_star / self._told_s_star - 1) >= TOLD_S_STAR_FRAC:
            self._told_s_star = progress.s_star
            self._report("capacity", {**self._speeds.described(), "caps": caps, "s_star": progress.s_star})
        if changed:
            loader.shares = shares.counts
            fields = {"step": self._num_orders, "workers": workers, "counts": list(shares.counts)}
            self._report("shares", {**fields, "reason": shares.reason})

    def _caps(self, total: int) -> list[int]:
        """Samples that each worker may have, 0: no cap of its own; the smallest rule holds.

        Measured memory must not end a run that goes well: where it holds too few, only the given caps count.
        """
        measured = self._speeds.max_samples
        given = self._config.partition.caps or (0,) * len(self._workers)
        most = self._config.partition.max_share or total
        caps = [least_cap(own, measured.get(rank, 0)) for rank, own in zip(self._workers, given, strict=True)]
        return caps if sum(min(cap or most, most) for cap in caps) >= total else list(given)

    def _check_caps(self, message: LoaderOpen) -> None:
        """Refuse a batch that the given caps do not hold."""
        partition, num_workers = self._config.partition, len(self._workers)
        name, batch = f"cannot share out loader {message.loader}", message.global_batch
        if partition.caps and len(partition.caps) != num_workers:
            raise PlanError(
                f"{name}: got {len(partition.caps)} numbers in partition.caps, need {num_workers} (one a worker); give"
                " one for each worker in rank order, 0 where it has no cap of its own",
                rank=message.rank,
            )
        own = partition.caps or (0,) * num_workers
        high = [least_cap(partition.max_share, each) or batch for each in own]
        if sum(high) < batch:
            most = f"{high[0]}" if len(set(high)) == 1 else ", ".join(map(str, high))
            raise PlanError(
                f"{name}: {num_workers} workers of at most {most} samples hold {sum(high)}, the global batch is"
                f" {batch}; raise partition.max_share or partition.caps, or lower global_batch",
                rank=message.rank,
            )
        equal = equal_shares(batch, num_workers)
        over = [rank for rank, n, most in zip(self._workers, equal, high, strict=True) if n > most]
        if over and not self._config.heterogeneous:
            raise PlanError(
                f"{name}: equal shares of {equal[0]} samples are more than partition.caps allow rank {over[0]}; run"
                " with --heterogeneous, raise its cap or lower global_batch",
                rank=message.rank,
            )

    def _current_shares(self, loader: Loader, index: int) -> tuple[int, ...]:
        """Each worker's part of a full batch, in rank order."""
        num_workers = len(self._workers)
        if not loader.trains or not self._config.heterogeneous:
            return equal_shares(loader.global_batch, num_workers)
        if not loader.shares:
            self._share_out(loader)
        if loader.shares:
            return loader.shares
        most, caps = self._config.partition.max_share, self._caps(loader.global_batch)
        return warmup_shares(loader.global_batch, num_workers, index, max_share=most, caps=caps)

    def _draw(self, loader: Loader, stream: Stream, members: tuple[int, ...], *, epoch: int) -> None:
        """Take the group's next batch off the epoch's cursor."""
        shares = dict(zip(self._workers, self._current_shares(loader, stream.num_drawn), strict=True))
        wanted = {rank: shares[rank] for rank in members}
        if loader.draw(stream, wanted, epoch=epoch, least=self._config.partition.min_share):
            self._num_orders += 1
            terms = self._terms(loader, stream.batches[-1].counts)
            if terms != stream.terms:
                stream.terms = terms
            stream.batches[-1].terms = stream.terms

    def _terms(self, loader: Loader, counts: dict[int, int]) -> CostTerms | None:
        """By what the members of a group find their own samples of a batch, where samples have costs."""
        if not loader.costs:
            return None
        places = [self._workers.index(rank) for rank in counts]
        fitted = len(places) > 1 and loader.trains and self._config.heterogeneous and self._speeds.known
        fits = self._speeds.fits if fitted else []
        most, caps = self._config.partition.max_share, self._caps(loader.global_batch)
        return self._costs.terms(
            loader.costs,
            list(counts.values()),
            fits=[fits[place] for place in places] if fitted else (),
            caps=[least_cap(most, caps[place]) for place in places],
        )

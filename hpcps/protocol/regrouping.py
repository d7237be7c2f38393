"""The groupings of a job one after the other: when a new one may begin, and at which batch of each worker.

A new grouping begins between two steps, for all workers together: each makes the steps that were drawn before,
then waits for the others. So it begins only where that is sure to happen: when all groups stand in the same
pass with samples left, or have not begun it and have none left before. It does not begin any more, and the
groups stay as they are, once a script reads two loaders at once or meets at barriers within an epoch.

Keeps the decisions and their memory; how groups are chosen is ``policy.regroup``'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from hpcps.config import RunConfig
from hpcps.errors import DataError
from hpcps.plan import Grouping
from hpcps.policy.grouping import GroupingDecision, GroupWorkers
from hpcps.policy.regroup import Regroup, RegroupFacts
from hpcps.policy.speed_classes import WorkerFacts
from hpcps.protocol.speeds import Report
from hpcps.protocol.streams import Generation, Pass

__all__ = ["Regrouping"]

Facts = Mapping[int, WorkerFacts]
"""By world rank."""


class Regrouping:
    """Groupings of the workers.

    Args:
        config: the run's settings.
        workers: world ranks of the workers, ascending.
        report: told of every new grouping (``grouping``), and when there will be no other (``grouping_fixed``).
    """

    def __init__(self, config: RunConfig, workers: Sequence[int], *, report: Report) -> None:
        self._config = config
        self._report = report
        self._groups = GroupWorkers(config.sync_mode, config.sync_group_size)
        self._together = GroupWorkers("sync", 0)
        self._policy = Regroup(config.grouping, config.sync_group_size)
        self._decision = self._together.decide(dict.fromkeys(workers, 1.0), generation=0)
        self._generations = [Generation(self._decision.grouping)]
        self._found = config.sync_mode == "sync"
        self._want_together = self._are_together = False
        self._speeds_changed = False
        self._fixed = ""
        self._passes: dict[int, Pass] = {}
        self._stands = dict.fromkeys(workers, -1)
        """Newest pass of each worker."""
        self._inside: set[int] = set()
        """Workers in the middle of a pass."""
        self._given = dict.fromkeys(workers, 0)
        """Batches that each worker got since the newest grouping."""
        self._told = dict.fromkeys(workers, 0)
        """Generation of each worker's last order."""
        self._batches_per_step = 1
        self._ahead = config.data.prefetch_steps
        """Orders that a worker may have beyond the batch that its script is at."""
        self._groups_before = 1
        """Groups of the grouping before the newest."""

    @property
    def grouping(self) -> Grouping:
        """The newest grouping."""
        return self._generations[-1].grouping

    # --- what happens -------------------------------------------------------------------------------

    def begin(self, facts: Callable[[], Facts], *, known: bool) -> None:
        """A first loader to train on is there: where groups need no measuring, they come before the first batch.

        Args:
            facts: of each worker.
            known: speeds are known, or do not matter.
        """
        if not self._found and not self._passes and (known or self._config.sync_mode == "async"):
            # what is predicted from speeds that nobody measured is no rate
            unmeasured = dataclasses.replace(self._first(facts()), samples_per_s=0.0, before_samples_per_s=0.0)
            self._take(unmeasured, number=0, bases={})

    def enter(self, rank: int, pass_: Pass, *, batches_per_step: int = 1, held: int = 0) -> None:
        """A worker asks for a batch of a pass.

        Args:
            rank: the worker.
            pass_: the pass; numbered here.
            batches_per_step: most batches that its script made one step of.
            held: batches that its loading processes take ahead.

        Raises:
            DataError: it reads two loaders at once while groups are still to be found.
        """
        self._batches_per_step = max(self._batches_per_step, batches_per_step)
        self._ahead = max(self._ahead, self._config.data.prefetch_steps + held)
        if pass_.number < 0:
            pass_.number = max(self._stands.values()) + 1
            self._passes[pass_.number] = pass_
        if pass_.number != self._stands[rank] and rank in self._inside:
            if not self._found:
                raise DataError(
                    f"cannot train on two loaders at once at rank {rank}: speeds are still being measured to form"
                    " groups; run one to its end before the other, or give capacity.prior",
                    rank=rank,
                )
            self._fix("the script reads two loaders at once")
        if pass_.number > self._stands[rank]:
            self._stands[rank] = pass_.number
            oldest = min(self._stands.values())
            for number in [number for number in self._passes if number < oldest]:
                del self._passes[number]

    def at(self, rank: int, number: int, index: int) -> Generation:
        """The grouping of a worker's batch of a pass."""
        found = (each for each in reversed(self._generations) if each.holds(rank, number, index))
        return next(found, self._generations[0])

    def newest_in(self, number: int) -> Generation:
        """The last grouping that began in a pass or before."""
        return next((each for each in reversed(self._generations) if each.number <= number), self._generations[0])

    def tell(self, rank: int, generation: int, *, end: bool) -> bool:
        """A worker gets an order; True if it has to be told the groups."""
        known, self._told[rank] = self._told[rank], generation
        if end:
            self._inside.discard(rank)
        else:
            self._inside.add(rank)
            self._given[rank] += generation == self.grouping.generation
        oldest = min(self._told.values())
        if known < generation and self._generations[0].grouping.generation < oldest:
            self._generations = [each for each in self._generations if each.grouping.generation >= oldest]
            for pass_ in self._passes.values():
                pass_.forget(oldest)
        return known != generation

    def on_barrier(self, rank: int) -> None:
        """A worker waits for the others; within a pass, groups of different pace could then wait for each other.

        Raises:
            DataError: some worker may still be on its way to the newest grouping, where all wait for all.
        """
        if rank not in self._inside:
            return
        if self._groups_before > 1 and min(self._given.values()) <= self._ahead:
            raise DataError(
                f"cannot wait at a barrier within an epoch at rank {rank}: the workers are about to change groups, and"
                " would wait for each other; call job.barrier() between epochs, or set grouping.regroup and"
                " guard.enabled off",
                rank=rank,
            )
        if len(self.grouping.groups) > 1:
            self._fix("workers meet at barriers within an epoch")

    def on_speeds(self) -> None:
        """Some worker's speed is another now."""
        self._speeds_changed = True

    def want_together(self, together: bool) -> None:
        """All workers shall be one group from the next safe point on, or again as the mode says."""
        self._want_together = together

    # --- a new grouping -----------------------------------------------------------------------------

    def consider(self, facts: Callable[[], Facts], *, measured: bool) -> bool:
        """Begin a new grouping, if it is time and a safe point; True if one began.

        Args:
            facts: of each worker.
            measured: every worker's speed was measured.
        """
        num_steps = min(self._given.values())
        # with a batch of every worker in each grouping no worker passes one by that others wait in
        if self._fixed or num_steps == 0 or not self._due(num_steps, measured):
            return False
        bases, before = self._safe_point(), self.grouping
        if bases is not None:
            number = max(self._stands.values())
            self._take(self._decide(facts(), num_steps), number=number, bases=bases)
        return self.grouping is not before

    def _due(self, num_steps: int, measured: bool) -> bool:
        if self._want_together != self._are_together:
            return True
        if self._are_together or self._config.sync_mode != "hybrid" or not measured:
            return False
        ask_step = self._decision.ask_step
        again = self._speeds_changed or (ask_step is not None and num_steps >= ask_step)
        return not self._found or (self._config.grouping.regroup and again)

    def _decide(self, facts: Facts, num_steps: int) -> GroupingDecision:
        if self._want_together and not self._are_together:
            speeds = {rank: worker.speed for rank, worker in facts.items()}
            decision = self._together.decide(speeds, generation=self.grouping.generation + 1, workers=facts)
            rate = self._decision.samples_per_s
            return dataclasses.replace(decision, reason="guard: one group of all workers", before_samples_per_s=rate)
        if self._are_together or not self._found:
            return self._first(facts)
        return self._policy.decide(RegroupFacts(present=self._decision, workers=facts, num_steps=num_steps))

    def _first(self, facts: Facts) -> GroupingDecision:
        """Groups as if there had been none."""
        speeds = {rank: worker.speed for rank, worker in facts.items()}
        self._found = True
        return self._groups.decide(speeds, generation=self.grouping.generation + 1, workers=facts)

    def _take(self, decision: GroupingDecision, *, number: int, bases: Mapping[int, int]) -> None:
        self._are_together = self._want_together
        self._speeds_changed = False
        if {group.workers for group in decision.grouping.groups} == {group.workers for group in self.grouping.groups}:
            self._decision = dataclasses.replace(decision, grouping=self.grouping)
            return
        self._decision = decision
        self._groups_before = len(self.grouping.groups)
        self._generations.append(Generation(decision.grouping, number, dict(bases)))
        self._given = dict.fromkeys(self._given, 0)
        self._report(
            "grouping",
            {
                "generation": decision.grouping.generation,
                "groups": [list(group.workers) for group in decision.grouping.groups],
                "before_samples_per_s": decision.before_samples_per_s,
                "samples_per_s": decision.samples_per_s,
                "reason": decision.reason,
            },
        )

    def _safe_point(self) -> dict[int, int] | None:
        """First batch in the newest pass that nobody of each worker's group has drawn; None: no grouping can begin."""
        number = max(self._stands.values())
        newest, generation = self._passes[number], self._generations[-1]
        bases: dict[int, int] = {}
        for group in generation.grouping.groups:
            stream = newest.streams.get((generation.grouping.generation, group.index))
            if stream is None:
                stands = max(0, *(self._stands[rank] for rank in group.workers))
                if not all(self._passes[earlier].exhausted for earlier in range(stands, number)):
                    return None
            elif stream.ended:
                return None
            drawn = stream.num_drawn if stream is not None else 0
            bases |= {rank: generation.base(rank, number) + drawn for rank in group.workers}
        torn = any(base % self._batches_per_step for base in bases.values())
        return None if newest.exhausted or torn else bases

    def _fix(self, reason: str) -> None:
        if not self._fixed:
            self._fixed = reason
            if self._config.sync_mode == "hybrid":
                self._report("grouping_fixed", {"generation": self.grouping.generation, "reason": reason})

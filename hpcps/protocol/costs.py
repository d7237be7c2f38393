"""Costs of samples as the coordinator knows them: what members are told of a batch, and what is learned of features.

Knows no sample's cost: workers do, and agree on them by a digest. Keeps the timed steps that costs are learned from.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcps.config import CapacityConfig
from hpcps.errors import DataError, ProtocolError
from hpcps.policy.capacity import CapacityFit, TimedStep
from hpcps.policy.learn_cost import CostRow, LearnCost
from hpcps.protocol.control import LoaderOpen, Order, OrderRequest
from hpcps.protocol.speeds import Report

__all__ = ["CostTerms", "Costs", "KnownTerms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTerms:
    """What every member of a group has to know to find its own samples; see ``Order``."""

    fixed_s: list[float]
    unit_s: list[float]
    caps: list[int]
    weights: list[float]

    def told(self, order: Order, *, start: int, member: int, again: bool) -> Order:
        """The order that tells one member, in place of its own samples, where the group's samples begin.

        Args:
            order: the rest of it.
            start: first sample of the group.
            member: place of the worker in its group.
            again: the worker's last order of this loader had these terms: they need not be sent again.
        """
        order = dataclasses.replace(order, start=start, member=member)
        if again:
            return order
        return dataclasses.replace(
            order, fixed_s=self.fixed_s, unit_s=self.unit_s, caps=self.caps, cost_weights=self.weights
        )


class KnownTerms:
    """A worker's memory of the terms that it was told last, for orders that leave them out."""

    def __init__(self) -> None:
        self._told: dict[int, Order] = {}
        """By loader: the last order that had terms."""

    def fill(self, order: Order) -> Order:
        """An order with the terms that hold for it."""
        if order.fixed_s:
            self._told[order.loader] = order
        told = self._told.get(order.loader)
        if told is None or order.end:
            return order
        return dataclasses.replace(
            order, fixed_s=told.fixed_s, unit_s=told.unit_s, caps=told.caps, cost_weights=told.cost_weights
        )


class Costs:
    """What is known of the costs of samples, for all loaders of a job.

    Costs are learned for one dataset at most. Its timed steps are told in the unit of work now in force: work is
    computed here from the features, not taken from the worker, whose orders may be older than the weights.

    Args:
        config: how many steps learning takes, and how often it looks again.
        workers: world ranks of the workers, ascending.
        report: told of new weights.
    """

    def __init__(self, config: CapacityConfig, workers: Sequence[int], *, report: Report) -> None:
        self._config = config
        self._policy = LearnCost(config)
        self._report = report
        kept = max(config.history_steps, config.warmup_steps)
        self._rows: dict[int, deque[CostRow]] = {rank: deque(maxlen=kept) for rank in workers}
        self._num_steps = dict.fromkeys(workers, 0)
        self._since = 0
        self._due = config.warmup_steps * len(self._rows)
        self._learned = ""
        self._weights: tuple[float, ...] = ()
        self._known = False

    @property
    def weights(self) -> tuple[float, ...]:
        """Learned cost of each feature; empty: nothing is learned yet, all samples cost the same."""
        return self._weights if self._known else ()

    def on_loader(self, message: LoaderOpen, costs: str) -> None:
        """A worker opened a loader.

        Args:
            message: what it says.
            costs: digest of the costs that the first worker to open this loader has.

        Raises:
            DataError: workers disagree on the costs, or costs of two datasets are to be learned.
        """
        if costs != message.costs:
            raise DataError(
                f"cannot share out loader {message.loader} by cost: rank {message.rank} has costs"
                f" {message.costs or 'none'}, others {costs or 'none'}; give the same cost= on every worker, from the"
                " same numbers",
                rank=message.rank,
            )
        if message.num_features == 0:
            return
        if self._learned not in ("", message.costs):
            raise DataError(
                f"cannot learn the costs of loader {message.loader} too: its features are {message.costs}, those of"
                f" another are {self._learned}; use LearnedCost for one dataset of a job, and give costs for others",
                rank=message.rank,
            )
        if not self._learned:
            self._learned = message.costs
            self._weights = (1.0, *[0.0] * (message.num_features - 1))

    def terms(
        self, costs: str, counts: Sequence[int], *, fits: Sequence[CapacityFit], caps: Sequence[int]
    ) -> CostTerms | None:
        """What the members of a group are told of a batch; None where all samples cost the same.

        Args:
            costs: digest of the loader's costs.
            counts: samples that each member would get if all cost the same.
            fits: curve of each member; empty while some are unknown: members then differ as their counts do.
            caps: samples that each member may have at most, 0: no cap. Raised to its count, so that the batch fits.
        """
        if not costs:
            return None
        raised = [max(cap, count) if cap else 0 for cap, count in zip(caps, counts, strict=True)]
        return CostTerms(
            fixed_s=[fit.fixed_s for fit in fits] or [0.0] * len(counts),
            unit_s=[fit.per_sample_s for fit in fits] or [1 / count if count else 2.0 for count in counts],
            caps=raised if any(raised) else [],
            weights=list(self.weights) if costs == self._learned else [],
        )

    def take(self, request: OrderRequest) -> tuple[list[TimedStep], bool]:
        """A worker's finished steps, and whether there are new weights, with which past steps are other work.

        Raises:
            ProtocolError: not one sum for each feature and step.
        """
        timed = list(zip(request.timed[::2], request.timed[1::2], strict=True))
        width = len(self._weights)
        if width == 0 or not request.features:
            return [TimedStep(work=work, seconds=time_s) for work, time_s in timed if work > 0], False
        if len(request.features) != width * len(timed):
            raise ProtocolError(
                f"cannot learn costs from rank {request.rank}: got {len(request.features)} sums of features for"
                f" {len(timed)} steps, need {width} a step; run the same hpcps on every rank",
                rank=request.rank,
            )
        steps: list[TimedStep] = []
        for index, (work, time_s) in enumerate(timed):
            row = CostRow(features=tuple(request.features[index * width : (index + 1) * width]), seconds=time_s)
            if row.features[0] > 0:
                self._keep(request.rank, row)
                steps.append(self._step(row))
            elif work > 0:  # a step on other data
                steps.append(TimedStep(work=work, seconds=time_s))
        return steps, self._since >= self._due and self._learn()

    def steps(self) -> Mapping[int, Sequence[TimedStep]]:
        """The last steps of each worker on the data whose costs are learned, oldest first, in the present unit."""
        return {rank: [self._step(row) for row in rows] for rank, rows in self._rows.items()}

    def _keep(self, rank: int, row: CostRow) -> None:
        self._num_steps[rank] += 1
        if self._num_steps[rank] > self._config.drop_steps:
            self._rows[rank].append(row)
            self._since += 1

    def _step(self, row: CostRow) -> TimedStep:
        work = sum(weight * total for weight, total in zip(self._weights, row.features, strict=True))
        return TimedStep(work=max(work, _LEAST_WORK), seconds=row.seconds)

    def _learn(self) -> bool:
        self._since = 0
        found = self._policy.decide([list(rows) for rows in self._rows.values()], current=self._weights)
        if found is None:
            return False
        self._due = self._config.interval_steps * len(self._rows)
        if not found.changed:
            return False
        self._weights, self._known = found.weights, True
        self._report("costs", {"weights": list(found.weights), "error": found.error_frac, "reason": found.reason})
        return True


_LEAST_WORK = 1e-3
"""Mean samples: a step of samples that should cost nothing is still some work."""

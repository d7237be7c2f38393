"""A batch as work: which samples of a group's batch are this worker's, and what they cost. Knows costs, no samples."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hpcps.config import PartitionConfig
from hpcps.policy.assign import AssignSamples
from hpcps.protocol.control import Order

__all__ = ["BatchWork", "TakePart"]

Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWork:
    """A batch whose samples have costs, in units of a mean sample.

    Args:
        own: cost of this worker's samples.
        group: cost of all samples of the group.
        features: where costs are learned, the sum of each feature over this worker's samples; else empty.
    """

    own: float
    group: float
    features: tuple[float, ...] = ()


class TakePart:
    """Finds a worker's samples in its group's batch; every member finds its own by the same rule.

    Args:
        config: least share.
    """

    def __init__(self, config: PartitionConfig) -> None:
        self._policy = AssignSamples(config)

    def find(self, order: Order, costs: Floats) -> tuple[Order, Flags]:
        """The order with this worker's own count, and which of the group's samples are its.

        Args:
            order: names the group's batch.
            costs: of each sample of that batch, shape [group_count].
        """
        chosen = self._policy.decide(costs, order.fixed_s, order.unit_s, caps=order.caps)
        count, num_idle = chosen.counts[order.member], chosen.counts.count(0)
        return dataclasses.replace(order, count=count, num_idle=num_idle), chosen.members == order.member

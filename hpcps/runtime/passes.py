"""What the job, loaders and the optimizer say to each other: where a script is in an epoch, and what a step needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hpcps.protocol.control import Order
from hpcps.runtime.work import BatchWork

__all__ = ["Contribution", "LoaderPass", "Order", "Stepper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What a group's step says besides the gradient itself.

    Args:
        weight: samples (or tokens) that the gradient is the mean of.
        share_frac: the group's part of a full global batch.
        options: numeric options of all parameter groups, flattened.
        present: one entry a tensor: whether anyone in the group had a gradient.
        sample_cost: mean cost of a sample of the step, in units of a mean sample of the data; 1 where unknown.
    """

    weight: float
    share_frac: float
    options: tuple[float, ...]
    present: Sequence[bool]
    sample_cost: float = 1.0


class Stepper(Protocol):
    """What the job needs of an optimizer that works on the servers."""

    def begin_batch(self) -> None:
        """A batch is about to be given to the script."""

    def end_batch(self) -> None:
        """The script asks for the next batch."""

    def idle_step(self) -> None:
        """Take part in the group's step without samples."""

    def drop_gradients(self) -> None:
        """Forget gradients that were not pushed."""

    def refuse_regroup(self) -> None:
        """Raise if groups cannot change now: a step is not over."""

    def refresh(self) -> None:
        """Give every worker the newest parameters; all pushes are settled. Collective over the workers."""

    def finish(self) -> None:
        """Flush all pushes and give every worker the final parameters. Collective over the workers."""


@dataclass(slots=True)
class LoaderPass:
    """One epoch of a loader, while the script is in it."""

    loader: int
    epoch: int
    orders: deque[tuple[Order, BatchWork | None]] = field(default_factory=deque)
    """Orders that the loader took, and the script has not got yet."""
    last: Order | None = None
    """The order that ended it."""
    held: int = 0
    """Batches that loading processes take before they hand out the first."""
    asked: int = 0
    """Batches asked for."""
    taken: int = 0
    """Orders that the loader took."""
    waited_s: float = 0.0
    """Seconds for which it waited for them."""
    given: int = 0
    """Batches that the script got, and steps made without it."""
    done: int = 0
    """Those that it is through with."""
    left: bool = False
    """The script left the loop before its end."""

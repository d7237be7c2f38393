"""The weighted mean of the gradients that one window of one shard collects.

The newest payload is only referred to, because a window often holds just one and then nothing need be
copied. `Accumulator.settle` frees the caller's memory by folding the payload in.

    add(a)     pending a                      own memory: -
    add(b)     pending b                      own memory: wa*a                 (assigned)
    settle()   pending -                      own memory: wa*a + wb*b          (added, b's memory is free)
    mean(w)    result  own memory * 1/w
"""

from __future__ import annotations

import math

import numpy as np

from hpcps import native
from hpcps.errors import ProtocolError
from hpcps.native import RealArray

__all__ = ["Accumulator"]


class Accumulator:
    """Sums payloads with weights, in the order they come.

    Args:
        numel: elements of the shard, at least 1.
        dtype: its dtype, ``float32`` or ``float64``; sums are in this dtype.
    """

    def __init__(self, numel: int, dtype: str) -> None:
        self._numel = numel
        self._dtype = np.dtype(dtype)
        self._smallest_total = float(np.finfo(self._dtype).tiny)
        self._own: RealArray | None = None
        self._num_added = 0
        self._num_folded = 0
        self._pending: RealArray | None = None
        self._pending_weight = 0.0

    @property
    def num_added(self) -> int:
        """Payloads added since the last `mean`."""
        return self._num_added

    def add(self, payload: RealArray, weight: float) -> None:
        """Add a payload; its memory must stay as it is until `settle`, `mean` or the next `add` returns.

        Args:
            payload: contiguous, of the shard's size and dtype; it is not written.
            weight: its weight in the mean, 0 or more.

        Raises:
            ProtocolError: the payload does not fit the shard, or the weight is not finite or below 0.
        """
        fits = payload.shape == (self._numel,) and payload.dtype == self._dtype
        if not fits or not (payload.flags.c_contiguous and payload.flags.aligned):
            raise ProtocolError(
                f"cannot add a payload: {payload.shape} {payload.dtype}, need ({self._numel},) {self._dtype},"
                " contiguous and aligned; run the same plan on every rank",
                op="accumulate",
            )
        if not (math.isfinite(weight) and weight >= 0):
            raise ProtocolError(
                f"cannot add a payload: weight {weight}, need a finite number of 0 or more; check the sample counts",
                op="accumulate",
            )
        self.settle()
        self._pending, self._pending_weight = payload, weight
        self._num_added += 1

    def settle(self) -> None:
        """Fold the pending payload into own memory, so that the caller may use its memory again."""
        if self._pending is None:
            return
        if self._own is None:
            self._own = np.empty(self._numel, dtype=self._dtype)
        if self._num_folded == 0:
            native.assign(self._own, self._pending, self._pending_weight)
        else:
            native.accumulate(self._own, self._pending, self._pending_weight)
        self._num_folded += 1
        self._pending = None

    def mean(self, total_weight: float) -> RealArray:
        """Give the weighted sum over the total weight, and start anew.

        A single payload that carries the whole weight is returned itself, uncopied. Otherwise the result stands
        in own memory and is valid until the next `settle`, or the second `add`, after this call.

        Args:
            total_weight: at least the smallest normal number of the dtype.

        Returns:
            The mean; a caller that changes it may change a payload, so it should only read.

        Raises:
            ProtocolError: nothing was added, or the total weight is out of range; nothing was changed.
        """
        if self._num_added == 0 or not self._smallest_total <= total_weight < math.inf:
            raise ProtocolError(
                f"cannot take a mean: {self._num_added} payloads with total weight {total_weight}, need at least 1"
                f" and a finite weight from {self._smallest_total:.3g}; close a window only when it holds weight",
                op="accumulate",
            )
        if self._num_folded == 0 and self._pending is not None and self._pending_weight == total_weight:
            result = self._pending
        else:
            self.settle()
            assert self._own is not None  # something was added, so something was folded
            result = self._own
            native.scale(result, 1.0 / total_weight)
        self._pending = None
        self._num_added = self._num_folded = 0
        return result

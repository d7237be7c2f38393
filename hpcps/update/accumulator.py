"""The weighted mean of the gradients that one window of one shard collects.

The newest payloads are only referred to, because a window often holds just one, and because several are decoded in
one pass over memory. `Accumulator.settle` frees the caller's memory by folding them in.

    add(a)     pending a                      own memory: -
    add(b)     pending a, b                   own memory: -
    settle()   pending -                      own memory: wa*a + wb*b          (a's and b's memory is free)
    add(c)     pending c                      own memory: wa*a + wb*b
    mean(w)    result                         own memory: (wa*a + wb*b + wc*c) * 1/w
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from hpcps import native
from hpcps.errors import ProtocolError
from hpcps.native import Bytes, RealArray
from hpcps.plan import Codec

__all__ = ["Accumulator", "DecodeTime"]


@dataclass(slots=True)
class DecodeTime:
    """Time that was spent on payloads of one codec."""

    num_elems: int = 0
    busy_s: float = 0.0


class Accumulator:
    """Sums payloads with weights, in the order they come.

    Args:
        numel: elements of the shard, at least 1.
        dtype: its dtype, ``float32`` or ``float64``; sums are in this dtype.

    Attributes:
        times: by codec, what folding took; passes over payloads of several codecs are not counted.
    """

    max_pending = 8
    """Payloads that one pass takes; one more folds them first."""

    def __init__(self, numel: int, dtype: str) -> None:
        self._numel = numel
        self._dtype = np.dtype(dtype)
        self._smallest_total = float(np.finfo(self._dtype).tiny)
        self._own: RealArray | None = None
        self._has_folded = False
        self._payloads: list[Bytes] = []
        self._codecs: list[Codec] = []
        self._weights: list[float] = []
        self.times: dict[Codec, DecodeTime] = {}

    @property
    def num_pending(self) -> int:
        """Payloads whose memory is still needed."""
        return len(self._payloads)

    def add(self, payload: Bytes, weight: float, *, codec: Codec = Codec.NONE) -> None:
        """Add a payload; its memory must stay as it is until `settle` or `mean` returns.

        Args:
            payload: contiguous bytes; it is not written.
            weight: its weight in the mean, 0 or more.
            codec: how it is encoded.

        Raises:
            ProtocolError: the payload cannot be of this shard, or the weight is not finite or below 0.
        """
        whole = self._numel * self._dtype.itemsize
        if codec is Codec.NONE and not (payload.size == whole and payload.flags.c_contiguous):
            raise ProtocolError(
                f"cannot add a payload: {payload.size} bytes, need {whole} for {self._numel} elements of"
                f" {self._dtype}; run the same plan on every rank",
                op="accumulate",
            )
        if not (math.isfinite(weight) and weight >= 0):
            raise ProtocolError(
                f"cannot add a payload: weight {weight}, need a finite number of 0 or more; check the sample counts",
                op="accumulate",
            )
        if len(self._payloads) == self.max_pending:
            self.settle()
        self._payloads.append(payload)
        self._codecs.append(codec)
        self._weights.append(weight)

    def settle(self) -> None:
        """Fold the pending payloads into own memory, so that the caller may use their memory again.

        Raises:
            ProtocolError: one of them is no encoding of this shard; nothing was changed.
        """
        self._fold(self._weights)

    def take_sum(self) -> RealArray | None:
        """The weighted sum so far, None where nothing was added; the accumulator is then empty.

        Raises:
            ProtocolError: as `settle`.
        """
        self.settle()
        total = self._own if self._has_folded else None
        self._own, self._has_folded = None, False
        return total

    def put_sum(self, total: RealArray) -> None:
        """Go on from a sum that another accumulator gave; the array is this one's from now on.

        Raises:
            ProtocolError: it does not fit, or something was added here before.
        """
        if total.shape != (self._numel,) or total.dtype != self._dtype or self._has_folded or self._payloads:
            raise ProtocolError(
                f"cannot go on from a sum: {total.shape} {total.dtype} into an accumulator of {self._numel} elements of"
                f" {self._dtype}, which has to be empty; run the same plan on every rank",
                op="accumulate",
            )
        self._own, self._has_folded = total, True

    def _fold(self, weights: list[float]) -> None:
        if not self._payloads:
            return
        if self._own is None:
            self._own = np.empty(self._numel, dtype=self._dtype)
        began_s = time.perf_counter()
        try:
            native.decode_accumulate(self._own, self._payloads, self._codecs, weights, assign=not self._has_folded)
        except ValueError as error:
            raise ProtocolError(f"{error}; run the same hpcps on every rank", op="accumulate") from error
        if len(set(self._codecs)) == 1:
            spent = self.times.setdefault(self._codecs[0], DecodeTime())
            spent.num_elems += self._numel * len(self._payloads)
            spent.busy_s += time.perf_counter() - began_s
        self._has_folded = True
        self._forget()

    def mean(self, total_weight: float) -> RealArray:
        """Give the weighted sum over the total weight, and start anew.

        A single payload that is not encoded and carries the whole weight is returned itself, uncopied. Otherwise the
        result stands in own memory and is valid until the next `settle`, or until `add` calls it.

        Args:
            total_weight: at least the smallest normal number of the dtype.

        Returns:
            The mean; a caller that changes it may change a payload, so it should only read.

        Raises:
            ProtocolError: nothing was added, or the total weight is out of range; nothing was changed.
        """
        if not (self._payloads or self._has_folded) or not self._smallest_total <= total_weight < math.inf:
            raise ProtocolError(
                f"cannot take a mean: {len(self._payloads)} payloads pending, total weight {total_weight}; need at"
                f" least 1 and a finite weight from {self._smallest_total:.3g}; close a window only when it holds"
                " weight",
                op="accumulate",
            )
        single = not self._has_folded and len(self._payloads) == 1 and self._weights[0] == total_weight
        if single and self._codecs[0] is Codec.NONE and self._is_aligned(self._payloads[0]):
            result: RealArray = self._payloads[0].view(self._dtype)
        else:
            self._settle_for(total_weight, single=single)
            assert self._own is not None  # something was added, so something was folded
            result = self._own
        self._forget()
        self._has_folded = False
        return result

    def _settle_for(self, total_weight: float, *, single: bool) -> None:
        """Fold, and divide by the total; what is single and has the whole weight is decoded as it is."""
        self._fold([1.0] if single else self._weights)
        if not single:
            assert self._own is not None
            native.scale(self._own, 1.0 / total_weight)

    def _is_aligned(self, payload: Bytes) -> bool:
        return payload.ctypes.data % self._dtype.itemsize == 0

    def _forget(self) -> None:
        self._payloads, self._codecs, self._weights = [], [], []

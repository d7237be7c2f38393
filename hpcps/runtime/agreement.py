"""How well the groups' gradients agree: a cheap sample on one small shard of a server.

About one window in sixteen of that shard is looked at. Of a window with pushes of several groups, the mean cosine
between two of their gradients is

    (|u_1 + ... + u_m|^2 - m) / (m (m - 1))        u_i: gradient i over its length

so one sum is all that is kept. It reads payloads and writes only its own memory: no update depends on it. Groups that
pull in one direction have a cosine above 0; gradients of parameters that overshoot to both sides have one below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from hpcps import native
from hpcps.native import Bytes, RealArray
from hpcps.plan import Codec, Shard
from hpcps.protocol.messages import PushHeader

__all__ = ["AgreementMeter"]

_EVERY = 16
"""Windows between two samples."""

_TRIES = 3
"""Windows that are looked at for one sample, where the first ones have the push of one group only."""

_ENOUGH_ELEMS = 4096
"""A shard of so many elements tells enough: the cosine of unrelated gradients is then within 0.05 of 0."""

_MOST_ELEMS = 1 << 14
"""Elements of the shard that are compared, the first ones: about 15 us a push that is looked at."""


class AgreementMeter:
    """Samples one server's windows."""

    def __init__(self) -> None:
        self._shard: Shard | None = None
        self._num_windows = 0
        self._tries_left = 0
        self._num_summed = 0
        self._sum = np.empty(0)
        self._decoded: RealArray | None = None

    def watch(self, shards: Iterable[Shard]) -> None:
        """Choose among the shards that the server holds now: the smallest that tells enough, else the largest."""
        held = sorted(shards, key=lambda shard: (shard.numel, shard.key))
        enough = [shard for shard in held if shard.numel >= _ENOUGH_ELEMS]
        chosen = next(iter(enough or held[-1:]), None)
        if chosen != self._shard:
            self._shard, self._decoded = chosen, None
            self._sum = np.zeros(min(chosen.numel, _MOST_ELEMS) if chosen else 0)
            self._num_windows = self._tries_left = self._num_summed = 0

    def add(self, header: PushHeader, payload: Bytes) -> None:
        """A push is let into its window; its payload is read before this returns."""
        shard = self._shard
        if shard is None or header.key != shard.key or not self._tries_left or header.num_groups < 2:
            return
        decoded = self._decode(shard, header.codec, payload)
        if decoded is None:
            return
        gradient = decoded[: self._sum.size].astype(np.float64)
        length = math.sqrt(float(np.dot(gradient, gradient)))
        if 0 < length < math.inf:
            if self._num_summed == 0:
                self._sum[:] = 0.0
            self._sum += gradient / length
            self._num_summed += 1

    def close(self, key: int) -> float | None:
        """A window closes: the mean cosine between two of its gradients, None where there is nothing to tell."""
        if self._shard is None or key != self._shard.key:
            return None
        self._num_windows += 1
        num, self._num_summed = self._num_summed, 0
        self._tries_left = max(0, self._tries_left - 1)
        if num > 1:
            self._tries_left = 0
        if self._num_windows % _EVERY == 0:
            self._tries_left = _TRIES
        return (float(np.dot(self._sum, self._sum)) - num) / (num * (num - 1)) if num > 1 else None

    def _decode(self, shard: Shard, codec: Codec, payload: Bytes) -> RealArray | None:
        """The gradient that a payload holds: itself where it is one as it stands; None: it is none of this shard.

        That is an error, which the window's sum finds and tells.
        """
        dtype = np.dtype(shard.dtype)
        if codec is Codec.NONE and payload.ctypes.data % dtype.itemsize == 0:
            return payload.view(dtype)
        if self._decoded is None:
            self._decoded = np.empty(shard.numel, dtype)
        try:
            native.decode(codec, payload, self._decoded)
        except ValueError:
            return None
        return self._decoded

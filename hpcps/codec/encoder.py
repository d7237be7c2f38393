"""How the owner of a shard turns its gradient into a payload: codec, error feedback, buffer.

Refuses to choose a codec: `ShardEncoder.use` is told.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hpcps import native
from hpcps.codec.error_feedback import ErrorFeedback
from hpcps.errors import ConfigError
from hpcps.native import RealArray
from hpcps.plan import WIRE_DTYPES, Codec, CodecSpec

__all__ = ["Encoded", "ShardEncoder", "fits", "nothing", "plain"]

_NOTHING: native.Bytes = np.zeros(16, np.uint8)
"""The header of a top-k payload with a count of 0."""


class Encoded(NamedTuple):
    """A payload. ``num_not_finite`` counts the elements that were infinite or undefined, where they were looked at."""

    codec: Codec
    payload: native.Bytes
    num_not_finite: int


def plain(values: RealArray) -> Encoded:
    """The values as they are, in their own memory."""
    return Encoded(Codec.NONE, values.view(np.uint8), 0)


def nothing(values: RealArray) -> Encoded:
    """A payload for values that do not count: top-k of no elements; of float64, or if smaller, the values."""
    if values.dtype != np.float32 or values.nbytes <= _NOTHING.size:
        return plain(values)
    return Encoded(Codec.TOPK, _NOTHING, 0)


def fits(spec: CodecSpec, *, numel: int, dtype: str) -> bool:
    """True if a codec can encode a shard and a payload never needs more bytes than the shard has.

    Packed is always shorter or left out: an encoder sends the values as they are instead.
    """
    itemsize = WIRE_DTYPES[dtype]
    if dtype != "float32" and spec.codec not in (Codec.NONE, Codec.FP32):
        return False
    if spec.codec is Codec.PACKED:
        return True
    return spec.wire_bytes(numel, itemsize) <= numel * itemsize


class ShardEncoder:
    """Encoder of one shard.

    Args:
        numel: elements of the shard, at least 1.
        dtype: its dtype.
        feedback: add to each gradient what the last payload left out.
    """

    def __init__(self, numel: int, dtype: str, *, feedback: bool) -> None:
        self._numel = numel
        self._dtype = dtype
        self._wants_feedback = feedback
        self._buffer: native.Bytes = np.empty(0, np.uint8)
        self.spec = CodecSpec(codec=Codec.NONE)
        self.feedback = ErrorFeedback(numel, dtype)

    def use(self, spec: CodecSpec) -> None:
        """Encode with this codec from now on; what is owed stays owed.

        Raises:
            ConfigError: the codec cannot encode this shard in the shard's bytes.
        """
        if not fits(spec, numel=self._numel, dtype=self._dtype):
            raise ConfigError(
                f"cannot encode {self._numel} elements of {self._dtype} as {spec}: it would take up to"
                f" {spec.wire_bytes(self._numel)} B of {self._numel * WIRE_DTYPES[self._dtype]} B, or needs float32;"
                " use none"
            )
        plain = spec.codec is Codec.FP32 and self._dtype == "float32"
        self.spec = CodecSpec(codec=Codec.NONE) if plain else spec

    def encode(self, gradient: RealArray) -> Encoded:
        """Encode a gradient.

        The payload is the gradient's own memory where nothing need be done, else this encoder's: it is valid until
        the next call. Its codec is the one in use, or none where packed would save nothing.

        Args:
            gradient: of the shard's size and dtype; it is not written.
        """
        codec, owes = self.spec.codec, self.feedback.owes
        if codec is Codec.NONE and not owes:
            return plain(gradient)
        need = self.spec.wire_bytes(self._numel, gradient.itemsize)
        if self._buffer.size < need:
            self._buffer = np.empty(need, np.uint8)
        if owes or (self._wants_feedback and codec is not Codec.PACKED):
            num_bytes, num_not_finite = self.feedback.encode(self.spec, gradient, self._buffer)
        else:
            keep = self.spec.keep(self._numel)
            num_bytes, num_not_finite = native.encode(codec, gradient, self._buffer, keep=keep)
        payload = self._buffer[:num_bytes]
        if codec is Codec.PACKED and num_bytes >= gradient.nbytes:
            values = self._unpack(payload) if owes else gradient
            return Encoded(Codec.NONE, values.view(np.uint8), num_not_finite)
        return Encoded(codec, payload, num_not_finite)

    def _unpack(self, payload: native.Bytes) -> RealArray:
        """The values of a packed payload: the gradient and what was owed, which nothing else holds any more."""
        values: RealArray = np.empty(self._numel, self._dtype)
        native.decode(Codec.PACKED, payload, values)
        return values

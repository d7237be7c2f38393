"""Error feedback: what a codec leaves out of one step is added to the next.

    v = gradient + residual        the codec encodes v
    residual = v - decoded(v)      so that decoded + residual is what went in, to an ulp of the larger

An element that is not finite never enters the residual.

Source: F. Seide et al., Interspeech 2014; S. P. Karimireddy et al., ICML 2019, algorithm 2.
"""

from __future__ import annotations

import numpy as np

from hpcps import native
from hpcps.native import RealArray
from hpcps.plan import Codec, CodecSpec

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """The residual of one shard. It stays when the codec changes, so a switch loses nothing.

    Args:
        numel: elements of the shard.
        dtype: its dtype.
    """

    def __init__(self, numel: int, dtype: str) -> None:
        self._numel = numel
        self._dtype = np.dtype(dtype)
        self._residual: RealArray | None = None

    @property
    def owes(self) -> bool:
        """True if there may be something that was not sent yet."""
        return self._residual is not None

    def encode(self, spec: CodecSpec, gradient: RealArray, out: native.Bytes) -> tuple[int, int]:
        """Encode the gradient and what is owed; the rest is owed from now on.

        Args:
            spec: the codec; one without loss pays all that is owed.
            gradient: of the shard's size and dtype.
            out: at least the codec's ``wire_bytes``.

        Returns: bytes of the payload, and how many elements were not finite.
        """
        if self._residual is None:
            self._residual = np.zeros(self._numel, self._dtype)
        keep = spec.keep(self._numel)
        sizes = native.encode(spec.codec, gradient, out, residual=self._residual, keep=keep)
        if spec.codec in (Codec.NONE, Codec.PACKED):
            self._residual = None
        return sizes

    def take(self) -> RealArray | None:
        """Hand over what is owed and owe nothing."""
        residual, self._residual = self._residual, None
        return residual

    def owe(self, residual: RealArray) -> None:
        """Owe this instead of what was owed; the array is this object's from now on."""
        self._residual = residual if residual.any() else None

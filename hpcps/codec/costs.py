"""What a codec costs on this rank with this gradient, by trying it. Changes nothing that training uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hpcps import native
from hpcps.native import RealArray
from hpcps.plan import CodecSpec

__all__ = ["Trial", "try_codec"]

_ROUNDS = 2
"""The first round pays for cold memory, the better one counts."""


class Trial(NamedTuple):
    """Seconds and bytes of one shard, and the relative L2 error of what is decoded."""

    encode_s: float
    decode_s: float
    num_bytes: int
    error: float


def try_codec(spec: CodecSpec, gradient: RealArray, *, clock: Callable[[], float] = time.perf_counter) -> Trial:
    """Encode a gradient with feedback and decode it again.

    Args:
        spec: a codec that fits the shard.
        gradient: finite or not; it is not written.
        clock: seconds, rising.
    """
    keep = spec.keep(gradient.size)
    out = np.empty(spec.wire_bytes(gradient.size, gradient.itemsize), np.uint8)
    residual, decoded = np.zeros_like(gradient), np.empty_like(gradient)
    encode_s = decode_s = float("inf")
    for _ in range(_ROUNDS):
        residual[:] = 0
        began_s = clock()
        num_bytes, _ = native.encode(spec.codec, gradient, out, residual=residual, keep=keep)
        encoded_s = clock()
        native.decode_accumulate(decoded, [out[:num_bytes]], [spec.codec], [1.0], assign=True)
        encode_s, decode_s = min(encode_s, encoded_s - began_s), min(decode_s, clock() - encoded_s)
    size = float(np.linalg.norm(gradient))
    error = float(np.linalg.norm(residual)) / size if size > 0 else 0.0
    return Trial(encode_s, decode_s, num_bytes, error if np.isfinite(error) else 0.0)

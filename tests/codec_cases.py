"""Inputs that codecs must stand, and a digest of all that a set of kernels makes of them.

Run as a program it prints the digests of the kernels that the environment chooses, as JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from hpcps import _codec_reference, native
from hpcps.plan import CodecSpec

SIZES = (0, 1, 255, 256, 257, 10_007, 300_000)
LOSSY = ("fp16", "bf16", "int8", "onebit", "topk:0.01", "topk:0.2", "topk:1")
CODECS = ("none", "fp32", "packed", *LOSSY)
IMPLEMENTATIONS = (
    pytest.param(
        native,
        id="built",
        marks=pytest.mark.skipif(not native.available(), reason=native.why_not() or "built kernels are there"),
    ),
    pytest.param(_codec_reference, id="numpy"),
)
FLOAT_MAX = np.finfo(np.float32).max


def normal(rng: np.random.Generator, numel: int) -> np.ndarray:
    return rng.standard_normal(numel)


def all_zero(rng: np.random.Generator, numel: int) -> np.ndarray:
    return np.zeros(numel)


def one_huge(rng: np.random.Generator, numel: int) -> np.ndarray:
    values = rng.standard_normal(numel)
    values[numel // 2 : numel // 2 + 1] = -3e38
    return values


def subnormal(rng: np.random.Generator, numel: int) -> np.ndarray:
    return rng.standard_normal(numel) * 1e-40


def tiny_to_huge(rng: np.random.Generator, numel: int) -> np.ndarray:
    return rng.standard_normal(numel) * 10.0 ** rng.uniform(-44, 38, numel)


def beyond_half(rng: np.random.Generator, numel: int) -> np.ndarray:
    return rng.choice([65503, 65504, 65519, 65519.99, 65520, 65536, 1e6, -65520, -7e4], numel)


def sparse(rng: np.random.Generator, numel: int) -> np.ndarray:
    return rng.standard_normal(numel) * (rng.random(numel) < 0.003)


def blocks_of_zeros(rng: np.random.Generator, numel: int) -> np.ndarray:
    """Blocks of all densities, with many around the one from which on packed sends them as they are."""
    few = rng.choice([0, 1, 8, 128, 245, 246, 247, 248, 249, 256], -(-numel // 256))
    return rng.standard_normal(numel) * (rng.random(numel) * 256 < np.repeat(few, 256)[:numel])


def half_zeros(rng: np.random.Generator, numel: int) -> np.ndarray:
    return np.where(rng.random(numel) < 0.5, rng.choice([1.5, -0.0, 1e-42, -3e38], numel), 0.0)


def ties(rng: np.random.Generator, numel: int) -> np.ndarray:
    return rng.choice([1.0, -1.0, 1.0, 0.5], numel)


def all_equal(rng: np.random.Generator, numel: int) -> np.ndarray:
    return np.full(numel, -0.25)


def not_finite(rng: np.random.Generator, numel: int) -> np.ndarray:
    values = rng.standard_normal(numel)
    return np.where(rng.random(numel) < 0.001, rng.choice([np.inf, -np.inf, np.nan], numel), values)


def all_not_finite(rng: np.random.Generator, numel: int) -> np.ndarray:
    return rng.choice([np.inf, -np.inf, np.nan], numel)


def negative_zeros(rng: np.random.Generator, numel: int) -> np.ndarray:
    return rng.choice([-0.0, 0.0, -0.0, 1e-3], numel)


def half_way(rng: np.random.Generator, numel: int) -> np.ndarray:
    """Values in the middle between two that int8, fp16 or bf16 can hold, and one that sets the scale."""
    values = (rng.integers(-127, 127, numel) + 0.5) * rng.choice([1.0, 2.0**-10, 2.0**-11, 2.0**-26], numel)
    values[::256] = 127
    return values


def near_the_end(rng: np.random.Generator, numel: int) -> np.ndarray:
    return rng.choice([1.0, -1.0], numel) * rng.uniform(0.9, 1.0, numel) * FLOAT_MAX


KINDS = (
    *(normal, all_zero, one_huge, subnormal, tiny_to_huge, beyond_half, sparse, ties, all_equal, not_finite),
    *(all_not_finite, negative_zeros, half_way, near_the_end, blocks_of_zeros, half_zeros),
)

LARGE_KINDS = (normal, ties, sparse, not_finite, near_the_end, blocks_of_zeros)
"""Kinds that are tried with the largest size too."""


def values(kind: str, numel: int, seed: int = 0) -> np.ndarray:
    """Float32 numbers of a kind, the same for the same arguments."""
    make = next(each for each in KINDS if each.__name__ == kind)
    with np.errstate(over="ignore"):
        return make(np.random.default_rng([seed, numel]), numel).astype(np.float32)


def encode(kernels: ModuleType, text: str, x: np.ndarray, residual: np.ndarray | None = None) -> tuple[np.ndarray, int]:
    """The payload of x and how many elements were not finite; checks that nothing is written behind the payload."""
    spec = CodecSpec.parse(text)
    out = np.full(spec.wire_bytes(x.size, x.itemsize) + 8, 0xA5, dtype=np.uint8)
    need = out.size - 8
    num_bytes, num_not_finite = kernels.encode(
        int(spec.codec), x, out[:need], residual=residual, keep=spec.keep(x.size)
    )
    assert 0 <= num_bytes <= need
    assert (out[need:] == 0xA5).all()
    return out[:num_bytes].copy(), num_not_finite


def decode(kernels: ModuleType, text: str, payload: np.ndarray, numel: int, dtype: str = "float32") -> np.ndarray:
    """What the payload holds, in a new array."""
    out = np.full(numel, 7, dtype=dtype)
    kernels.decode(int(CodecSpec.parse(text).codec), payload, out)
    return out


def bits(array: np.ndarray) -> np.ndarray:
    """Bits of floats, where any NaN equals any other."""
    return np.where(np.isnan(array), np.array(np.nan, array.dtype), array).view(f"u{array.itemsize}")


def digests(kernels: ModuleType) -> Iterator[tuple[str, str]]:
    """Case and digest: payload, residual and counts of two steps, and what is decoded and summed of them."""
    for kind in KINDS:
        for numel in SIZES if kind in LARGE_KINDS else SIZES[:-1]:
            steps = [values(kind.__name__, numel, seed) for seed in range(2)]
            for text in CODECS:
                yield f"{kind.__name__} {numel} {text}", _digest(kernels, text, steps)


def _digest(kernels: ModuleType, text: str, steps: list[np.ndarray]) -> str:
    seen = hashlib.sha256()
    residual = np.full(steps[0].size, 1e-3, dtype=np.float32)
    payloads = [encode(kernels, text, steps[1])[0]]
    for x in steps:
        payload, num_not_finite = encode(kernels, text, x, residual)
        payloads.append(payload)
        seen.update(str(num_not_finite).encode())
        seen.update(residual.tobytes())
    for payload in payloads:
        seen.update(payload.tobytes())
        seen.update(bits(decode(kernels, text, payload, residual.size)).tobytes())
    acc = steps[0].copy()
    codec = int(CodecSpec.parse(text).codec)
    kernels.decode_accumulate(acc, payloads, [codec] * 3, [0.3, 0.3, 1 / 7])
    seen.update(bits(acc).tobytes())
    return seen.hexdigest()[:16]


if __name__ == "__main__":
    print(json.dumps([native.isa(), dict(digests(native))]))

"""Writes inputs for the fuzz targets to start from: valid payloads of every codec, and ordinary numbers.

python tests/fuzz/seeds.py FOLDER        makes FOLDER/decode and FOLDER/encode
"""

from __future__ import annotations

import itertools
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hpcps import native
from hpcps.plan import CodecSpec

CODECS = ("none", "fp32", "fp16", "bf16", "int8", "onebit", "topk:0.05", "topk:1", "packed")
SIZES = (1, 7, 256, 700)
# flags of decode.cpp and encode.cpp
ASSIGN, FLOAT64, TORN = 1, 2, 4
RESIDUAL, SIZED, SAMPLED = 1, 4, 8
SAMPLED_ELEMS = 65537


def payload_of(text: str, x: np.ndarray) -> tuple[int, bytes]:
    spec = CodecSpec.parse(text)
    out = np.zeros(spec.wire_bytes(x.size, x.itemsize), dtype=np.uint8)
    num_bytes, _ = native.encode(int(spec.codec), x, out, keep=spec.keep(x.size))
    return int(spec.codec), out[:num_bytes].tobytes()


def decode_input(
    flags: int, numel: int, payloads: Sequence[tuple[int, bytes]], weight: float, more: bytes = b""
) -> bytes:
    parts = [struct.pack("<BdH", codec, weight, len(data)) + data for codec, data in payloads]
    return struct.pack("<BI", flags, numel) + b"".join(parts) + more


def decode_inputs(rng: np.random.Generator) -> Iterator[bytes]:
    for numel, text in itertools.product(SIZES, CODECS):
        x = rng.standard_normal(numel).astype(np.float32)
        payload = payload_of(text, np.where(x > 1, x, 0) if text == "packed" else x)
        yield decode_input(0, numel, [payload], 0.5)
        yield decode_input(ASSIGN | 8, numel, [payload_of("int8", x), payload, payload_of("topk", x)], 1.0)
        yield decode_input(TORN, numel, [payload], -1.0, bytes(16) + rng.bytes(8))
        if text in ("none", "fp32"):
            yield decode_input(FLOAT64, numel, [payload_of(text, x.astype(np.float64))], 0.1)
    x = rng.standard_normal(300).astype(np.float32)
    yield decode_input(0, 300, [payload_of("int8", x)] * 4, 0.25)
    yield decode_input(0, 0, [payload_of(text, x[:0]) for text in CODECS], 1.0)


def encode_input(flags: int, text: str, x: np.ndarray, size: int = 0) -> bytes:
    spec = CodecSpec.parse(text)
    numel = SAMPLED_ELEMS + size if flags & SAMPLED else size if flags & SIZED else x.size // 2
    keep = max(spec.keep(numel) - 1, 0)  # the target adds 1
    return struct.pack("<BBIH", flags, int(spec.codec), keep, size) + x.tobytes()


def encode_inputs(rng: np.random.Generator) -> Iterator[bytes]:
    kinds = (
        rng.standard_normal(540),
        rng.standard_normal(540) * 10.0 ** rng.uniform(-44, 38, 540),
        rng.choice([1.0, -1.0, 0.0, 0.0, -0.0, 0.5], 540),
        rng.choice([65504, 65520, 7e4, 3.3e38, -3.4e38], 540),
        rng.choice([np.inf, -np.inf, np.nan, 1.0, -2.0, 1e-40], 540),
    )
    for x, text, flags in itertools.product(kinds, CODECS, (0, RESIDUAL)):
        yield encode_input(flags, text, x.astype(np.float32))
        if text in ("none", "fp32"):
            yield encode_input(flags | FLOAT64, text, x)
    for size, x in itertools.product(range(64), (*kinds[::2], np.ones(2))):  # the target takes a few of these
        yield encode_input(RESIDUAL | SAMPLED, ("topk:0.05", "topk:0.7")[size % 2], x.astype(np.float32), size)
    # the most that a bitmap is sent for, and zeros at the end, where whole vectors are written
    nearly_full = np.where(np.arange(256) < 247, kinds[0][:256], 0).astype(np.float32)
    yield encode_input(SIZED, "packed", np.repeat(nearly_full, 2), 256)
    yield encode_input(RESIDUAL | SIZED | 16, "int8", kinds[0][:40].astype(np.float32), 1000)


def main() -> None:
    makers = {"decode": decode_inputs, "encode": encode_inputs}
    for name, make in makers.items():
        folder = Path(sys.argv[1], name)
        folder.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(make(np.random.default_rng(1))):
            (folder / f"{number:04}").write_bytes(data)


if __name__ == "__main__":
    main()

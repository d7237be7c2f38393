"""Damaged payloads through the kernels on arrays of exactly their size, for AddressSanitizer to watch.

python shim_fuzz.py LIBRARY ROUNDS SEED
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from host_module import HostModule

from hpcps.device import DeviceCodecs

TOPK, PACKED = 6, 7


def damaged(rng: np.random.Generator, codec: int, payload: np.ndarray) -> np.ndarray:
    """The payload with bytes changed, or cut or grown where its size says nothing."""
    payload = payload.copy()
    kind = rng.integers(0, 6)
    if codec == PACKED and kind < 5:
        at = rng.integers(0, min(40, payload.size)) if kind < 2 else rng.integers(0, payload.size)
        payload[at] ^= rng.integers(1, 256, dtype=np.uint8)
        return payload[: rng.integers(0, payload.size + 1)].copy() if kind == 4 else payload
    if kind == 0 and payload.size:
        payload[rng.integers(0, payload.size, 3)] = rng.integers(0, 256, 3)
    elif kind == 1 and codec == TOPK:
        payload = payload[: rng.integers(0, payload.size + 1)].copy()
    elif kind == 2 and codec == TOPK:
        payload = np.concatenate([payload, rng.integers(0, 256, 5, dtype=np.uint8)])
    elif kind == 3 and codec == TOPK and payload.size > 16:
        payload[16:] = rng.integers(0, 256, payload.size - 16)
    elif kind == 4 and codec == TOPK:
        payload[:16].view(np.uint32)[rng.integers(0, 4)] = rng.choice([0, 1, 2, 2**31, 2**32 - 1, payload.size])
    elif kind == 5 and codec == TOPK and payload.size > 16:
        at = 16 + rng.integers(0, payload[4:8].view(np.uint32)[0])
        payload[at] += (payload[at] < 120) * rng.integers(1, 8, dtype=np.uint8)  # all later elements move up
    return payload


def main() -> None:
    module = HostModule(Path(sys.argv[1]))
    rounds, seed = int(sys.argv[2]), int(sys.argv[3])
    module.set_seed(seed)
    rng = np.random.default_rng(seed)
    codecs = DeviceCodecs(np, module)
    refused = 0
    for _ in range(rounds):
        codec, numel = int(rng.choice([*range(TOPK), *[TOPK, PACKED] * TOPK])), int(rng.integers(1, 3000))
        x = rng.standard_normal(numel).astype(np.float32)
        if codec == PACKED:
            x[rng.random(numel) < rng.choice([0.03, 0.5, 0.995])] = 0
        keep = int(rng.integers(1, numel + 1)) if codec == TOPK else 0
        out = np.empty(16 + 3 * keep + numel // 127 if codec == TOPK else 4 * numel + 12, np.uint8)
        num_bytes, _ = codecs.encode(codec, x, out, residual=np.zeros(numel, np.float32), keep=keep)
        payload = damaged(rng, codec, out[:num_bytes])
        acc = np.zeros(numel, np.float32)
        try:
            codecs.decode_accumulate(acc, [payload, payload], [codec, codec], [1.0, 0.5], assign=bool(rng.integers(2)))
        except ValueError:
            refused += 1
    print(f"{rounds} payloads, {refused} refused")


if __name__ == "__main__":
    main()

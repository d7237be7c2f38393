"""Runs top-k by the shim without the barrier of a line; ends with 0 if all is right all the same.

python mutant.py LINE    (-1: with all barriers)
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rigs import make_rig
from test_gpu_codecs import check_encode, numbers, same_bits

from hpcps import native
from hpcps.plan import Codec

NUMEL, KEEP, NUM_SEEDS = 5000, 2600, 6


def main() -> None:
    rig = make_rig("shim")
    rig.module.skip_barrier(int(sys.argv[1]))
    for seed in range(NUM_SEEDS):
        rig.module.set_seed(seed)
        x, residual = numbers(seed, NUMEL), numbers(seed + 9, NUMEL)
        payload = check_encode(rig, Codec.TOPK, x, residual, keep=KEEP)
        acc, expected = np.zeros(NUMEL, np.float32), np.zeros(NUMEL, np.float32)
        native.decode_accumulate(expected, [payload], [Codec.TOPK], [1.0])
        rig.codecs.decode_accumulate(acc, [payload], [Codec.TOPK], [1.0])
        assert same_bits(acc, expected)


if __name__ == "__main__":
    main()

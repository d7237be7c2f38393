"""Payloads, residuals and sums: one body over numpy and every set of built kernels, bit for bit."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import codec_cases
import numpy as np
import pytest
from codec_cases import CODECS, KINDS, LOSSY, bits, decode, encode, values

from hpcps import _codec_reference, native
from hpcps.plan import Codec, CodecSpec


def digests_of(isa_setting: str) -> tuple[str, dict[str, str]]:
    """The kernels' name and the digest of every case, from a process of its own."""
    settings = {"HPCPS_NATIVE": "", "HPCPS_ISA": isa_setting}
    done = subprocess.run(
        [sys.executable, codec_cases.__file__], env=os.environ | settings, capture_output=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    isa, found = json.loads(done.stdout)
    return isa, found


@functools.cache
def reference_digests() -> dict[str, str]:
    return dict(codec_cases.digests(_codec_reference))


@pytest.mark.skipif(not native.available(), reason=native.why_not() or "built kernels are there")
@pytest.mark.parametrize("setting", ["portable", "auto"])
def test_built_kernels_have_the_bits_of_numpy(setting):
    isa, found = digests_of(setting)
    assert isa == "portable" or setting == "auto"
    want = reference_digests()
    assert [case for case in want if found[case] != want[case]] == []
    assert len(want) == len(found) > len(KINDS) * len(CODECS)


def test_without_the_built_kernels_numpy_is_used():
    program = "from hpcps import _codec_reference, native; print(native._codecs is _codec_reference)"
    environ = os.environ | {"HPCPS_NATIVE": "off"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (b"True\n", b"")


@pytest.mark.parametrize("codec", [Codec.FP16, Codec.BF16])
def test_all_patterns_of_16_bits_decode_like_a_cast(codecs, codec):
    patterns = np.arange(65536, dtype=np.uint16)
    got = decode(codecs, codec.name, patterns.view(np.uint8), patterns.size)
    if codec is Codec.FP16:
        want = patterns.view(np.float16).astype(np.float32)
    else:
        want = (patterns.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(bits(got), bits(want))


def test_random_patterns_encode_like_the_cast_of_numpy(codecs):
    """Beyond the range the cast gives infinity and the codec the largest half."""
    x = np.random.default_rng(3).integers(0, 2**32, 2_000_000, dtype=np.uint32).view(np.float32)
    payload, num_not_finite = encode(codecs, "fp16", x)
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    beyond = np.isinf(want) & np.isfinite(x)
    want[beyond] = np.copysign(65504, want[beyond])
    assert beyond.sum() > 500_000
    assert np.array_equal(bits(payload.view(np.float16)), bits(want))
    assert num_not_finite == (~np.isfinite(x)).sum()


def test_every_half_and_the_middle_between_two_is_rounded_to_even(codecs):
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (halves[:-1] + halves[1:]) / 2
    payload = encode(codecs, "fp16", np.concatenate([halves, middle, -middle]))[0].view(np.uint16)
    even = np.arange(0x7BFF) + np.arange(0x7BFF) % 2
    assert np.array_equal(payload, np.concatenate([np.arange(0x7C00), even, even + 0x8000]))


@pytest.mark.parametrize("text", ["packed", *LOSSY])
def test_a_residual_of_nothing_changes_no_payload(codecs, text):
    """Adding -0 changes no number; adding +0 would turn -0 into +0."""
    for kind in ("normal", "not_finite", "tiny_to_huge", "negative_zeros"):
        x = values(kind, 10_007)
        plain = encode(codecs, text, x)
        fed = encode(codecs, text, x, np.full_like(x, -0.0))
        assert plain[1] == fed[1]
        assert plain[0].tobytes() == fed[0].tobytes()


@pytest.mark.parametrize("text", ["none", "fp32", "packed"])
def test_lossless_codecs_send_float32_as_it_is(codecs, text):
    x = np.random.default_rng(4).integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    x[values("blocks_of_zeros", x.size) == 0] = 0
    payload, num_not_finite = encode(codecs, text, x)
    assert num_not_finite == (~np.isfinite(x)).sum() > 0
    assert text == "packed" or payload.tobytes() == x.tobytes()  # the bits of NaNs as well
    assert decode(codecs, text, payload, x.size).tobytes() == x.tobytes()


def test_none_sends_float64_as_it_is(codecs):
    x = np.random.default_rng(5).integers(0, 2**64, 10_000, dtype=np.uint64).view(np.float64)
    residual = np.full_like(x, 1e-300)
    with np.errstate(all="ignore"):
        want = x + residual
    payload, num_not_finite = encode(codecs, "none", x, residual)
    assert num_not_finite == (~np.isfinite(want)).sum() > 0
    assert np.array_equal(bits(payload.view(np.float64)), bits(want))
    assert np.array_equal(bits(decode(codecs, "none", payload, x.size, "float64")), bits(want))
    assert np.array_equal(residual, np.where(np.isfinite(want), 0, 1e-300))


def test_fp32_of_float64_keeps_finite_values_finite_and_the_rest_in_the_residual(codecs):
    x = np.array([1 / 3, 1e300, -1e300, 3.4028235e38, 3.4028236e38, 1e-60, np.inf, -np.inf, np.nan, 0.0, -0.0] * 30)
    residual = np.full_like(x, 2.0**-60)
    v = x + residual
    payload, num_not_finite = encode(codecs, "fp32", x, residual)
    got = decode(codecs, "fp32", payload, x.size, "float64")
    finite = np.isfinite(x)
    assert num_not_finite == 90
    assert np.array_equal(np.isfinite(got), finite)
    assert np.array_equal(bits(got)[~finite], bits(x)[~finite])
    assert np.array_equal(residual[finite], v[finite] - got[finite])
    assert (residual[~finite] == 2.0**-60).all()
    assert np.abs(got[finite]).max() == codec_cases.FLOAT_MAX
    within = np.abs(v) <= codec_cases.FLOAT_MAX
    assert np.array_equal(got[within], v[within].astype(np.float32).astype(np.float64))
    acc = np.ones_like(x)
    codecs.decode_accumulate(acc, [payload], [1], [1 / 3])
    assert np.array_equal(bits(acc), bits(1 + got * (1 / 3)))


@pytest.mark.parametrize("text", CODECS)
def test_payloads_and_outputs_may_stand_at_any_address(codecs, text):
    x, spec = values("normal", 1000), CodecSpec.parse(text)
    want, _ = encode(codecs, text, x)
    for shift in range(1, 9):
        buffer = np.zeros(spec.wire_bytes(x.size) + shift, dtype=np.uint8)
        num_bytes, _ = codecs.encode(int(spec.codec), x, buffer[shift:], residual=None, keep=spec.keep(x.size))
        payload = buffer[shift : shift + num_bytes]
        assert payload.tobytes() == want.tobytes()
        assert np.array_equal(decode(codecs, text, payload, x.size), decode(codecs, text, want, x.size))
        acc = np.ones_like(x)
        codecs.decode_accumulate(acc, [payload, want], [int(spec.codec)] * 2, [0.5, 0.25], assign=True)
        assert np.allclose(acc, 0.75 * decode(codecs, text, want, x.size), rtol=1e-6)


THREADS_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import hashlib, numpy as np
from codec_cases import CODECS, bits, decode, encode, values
from hpcps import native
from hpcps.plan import CodecSpec
numel = 800_001  # three parts
for kind in ("ties", "not_finite", "blocks_of_zeros"):
    xs = [values(kind, numel, seed) for seed in range(2)]
    for text in CODECS:
        found = set()
        for num_threads in (1, 2, 5):
            native.set_num_threads(num_threads)
            assert native.num_threads() == num_threads
            residual = np.full(numel, 1e-3, np.float32)
            payloads = [encode(native, text, x, residual) for x in xs]
            acc = xs[1].copy()
            codec = int(CodecSpec.parse(text).codec)
            native.decode_accumulate(acc, [payload for payload, _ in payloads], [codec] * 2, [0.5, 0.5])
            out = decode(native, text, payloads[0][0], numel)
            parts = [residual, bits(acc), bits(out), *(payload for payload, _ in payloads)]
            digest = hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
            found.add((digest, *(count for _, count in payloads)))
        assert len(found) == 1, (kind, text, found)
print("same")
"""


POOL_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import os, threading, numpy as np
from codec_cases import encode, values
from hpcps import native
native.set_num_threads(2)
x = values("normal", 600_001)
texts = ("fp16", "int8", "topk:0.01")
want = [encode(native, text, x)[0].tobytes() for text in texts]
wrong = []
def work(text, payload):
    for _ in range(10):
        if encode(native, text, x)[0].tobytes() != payload:
            wrong.append(text)
def work_in_threads():
    threads = [threading.Thread(target=work, args=each) for each in zip(texts, want)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
work_in_threads()
child = os.fork()
work_in_threads()
if child == 0:
    os._exit(len(wrong))
print(wrong, os.waitpid(child, 0)[1])
"""


def run_program(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, str(Path(codec_cases.__file__).parent)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.skipif(not native.available(), reason="numpy uses one thread")
def test_results_do_not_depend_on_the_number_of_threads():
    assert run_program(THREADS_PROGRAM) == "same\n"


@pytest.mark.skipif(not native.available(), reason="numpy uses one thread")
def test_the_threads_serve_several_callers_and_a_forked_child():
    assert run_program(POOL_PROGRAM) == "[] 0\n"


def test_the_number_of_threads_is_kept(codecs):
    before = codecs.num_threads()
    try:
        codecs.set_num_threads(3)
        assert codecs.num_threads() == 3
    finally:
        codecs.set_num_threads(before)

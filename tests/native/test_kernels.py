"""The dense kernels: one body over the numpy reference and every set of built kernels, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from hpcps import _codec_reference, _native_reference, native

DTYPES = ("float32", "float64")
SIZES = (0, 1, 3, 8, 17, 2047, 2048, 2049, 16384, 16385, 40001)  # around vector, block and chunk bounds
WEIGHTS = (0.0, 1.0, -0.3, 1 / 3, 37.0)

BUILT = pytest.param(
    native,
    id="built",
    marks=pytest.mark.skipif(not native.available(), reason=native.why_not() or "built kernels are there"),
)
REFERENCE = pytest.param(_native_reference, id="numpy")


@pytest.fixture(params=[BUILT, REFERENCE])
def kernels(request):
    return request.param


def numbers(seed: int, numel: int, dtype: str) -> np.ndarray:
    """Random numbers of many magnitudes, with both zeros, infinities and a subnormal among them."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(numel) * 10.0 ** rng.integers(-6, 6, numel)).astype(dtype)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.finfo(dtype).smallest_subnormal], dtype=dtype)
    values[: special.size] = special[: values.size]
    return values


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    """Equal bits, where any NaN equals any other."""
    assert got.dtype == want.dtype
    nan = np.isnan(want)
    unsigned = f"u{got.itemsize}"
    return bool(
        np.array_equal(np.isnan(got), nan) and np.array_equal(got.view(unsigned)[~nan], want.view(unsigned)[~nan])
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_kernels_have_the_bits_of_plain_numpy(kernels, numel, dtype):
    xs = [numbers(seed, numel, dtype) for seed in range(len(WEIGHTS))]
    factors = [np.dtype(dtype).type(weight) for weight in WEIGHTS]
    with np.errstate(all="ignore"):
        total = numbers(99, numel, dtype)
        acc = total.copy()
        for x, weight, factor in zip(xs, WEIGHTS, factors, strict=True):
            kernels.accumulate(acc, x, weight)
            total += factor * x
            assert same_bits(acc, total)
            out = np.full(numel, 7, dtype=dtype)
            kernels.assign(out, x, weight)
            assert same_bits(out, factor * x)
            scaled = x.copy()
            kernels.scale(scaled, weight)
            assert same_bits(scaled, x * factor)
        combined = np.full(numel, 7, dtype=dtype)
        kernels.combine(combined, xs, list(WEIGHTS))
        want = factors[0] * xs[0]
        for x, factor in zip(xs[1:], factors[1:], strict=True):
            want += factor * x
        assert same_bits(combined, want)


def test_a_product_is_rounded_before_it_is_added(kernels):
    """1/3 * 3 rounds to 1 in float32; fused with -1 it would leave the rounding error of 1/3 instead of 0."""
    acc = np.full(64, -1, dtype=np.float32)
    kernels.accumulate(acc, np.full(64, 3, dtype=np.float32), 1 / 3)
    assert not acc.any()


def test_combine_adds_in_the_order_given(kernels):
    xs = [np.full(5, value, dtype=np.float32) for value in (1e8, -1e8, 1.0)]
    out = np.empty(5, dtype=np.float32)
    kernels.combine(out, xs, [1.0, 1.0, 1.0])
    assert out.tolist() == [1.0] * 5
    kernels.combine(out, [xs[2], xs[0], xs[1]], [1.0, 1.0, 1.0])
    assert out.tolist() == [0.0] * 5


def test_slices_of_one_buffer_and_read_only_inputs_are_accepted(kernels):
    buffer = np.arange(10, dtype=np.float32)
    source = buffer[4:7]
    source.flags.writeable = False
    kernels.accumulate(buffer[1:4], source, 2.0)
    assert buffer.tolist() == [0, 9, 12, 15, 4, 5, 6, 7, 8, 9]


def misaligned(numel: int) -> np.ndarray:
    return np.zeros(4 * numel + 1, dtype=np.uint8)[1:].view(np.float32)


def read_only(numel: int) -> np.ndarray:
    array = np.zeros(numel, dtype=np.float32)
    array.flags.writeable = False
    return array


GOOD = np.zeros(4, dtype=np.float32)
WRONG = {
    "integer": (lambda: (np.zeros(4, dtype=np.int32), GOOD), TypeError, "need float32 or float64"),
    "half": (lambda: (GOOD.copy(), np.zeros(4, dtype=np.float16)), TypeError, "dtype float16, need float32 or"),
    "two dtypes": (lambda: (GOOD.copy(), np.zeros(4)), TypeError, "dtype float64, the array written is float32"),
    "byte order": (lambda: (GOOD.copy(), np.zeros(4, dtype=">f4")), TypeError, None),
    "list": (lambda: (GOOD.copy(), [0.0] * 4), TypeError, None),
    "two dimensions": (lambda: (np.zeros((2, 2), dtype=np.float32), GOOD), TypeError, "2 dimensions, need 1"),
    "strided": (lambda: (GOOD.copy(), np.zeros(8, dtype=np.float32)[::2]), TypeError, "not contiguous"),
    "reversed": (lambda: (GOOD.copy(), np.zeros(4, dtype=np.float32)[::-1]), TypeError, "not contiguous"),
    "read-only": (lambda: (read_only(4), GOOD), TypeError, None),
    "sizes": (lambda: (GOOD.copy(), np.zeros(5, dtype=np.float32)), ValueError, "5 elements, the array written has 4"),
    "misaligned": (lambda: (GOOD.copy(), misaligned(4)), ValueError, "not aligned"),
    "itself": (lambda: (GOOD, GOOD), ValueError, "shares memory"),
    "overlap": (lambda: ((a := np.zeros(5, dtype=np.float32))[:4], a[1:]), ValueError, "shares memory"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arrays_are_refused_before_any_effect(kernels, case):
    make, kind, message = WRONG[case]
    for call in (
        lambda out, x: kernels.accumulate(out, x, 1.0),
        lambda out, x: kernels.assign(out, x, 1.0),
        lambda out, x: kernels.combine(out, [x], [1.0]),
    ):
        out, x = make()
        with pytest.raises(kind, match=message):
            call(out, x)
        assert not np.asarray(out).any()


@pytest.mark.parametrize("case", ["integer", "two dimensions", "read-only"])
def test_scale_refuses_wrong_arrays(kernels, case):
    make, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        kernels.scale(make()[0], 2.0)


def test_combine_names_the_wrong_array_and_the_wrong_count(kernels):
    out, x = np.zeros(4, dtype=np.float32), np.ones(4, dtype=np.float32)
    with pytest.raises(ValueError, match=r"cannot combine xs\[1\]: 3 elements, the array written has 4; pass arrays"):
        kernels.combine(out, [x, x[:3]], [1.0, 1.0])
    with pytest.raises(ValueError, match="1 arrays and 2 weights, need as many of both"):
        kernels.combine(out, [x], [1.0, 1.0])
    with pytest.raises(ValueError, match="0 arrays and 0 weights"):
        kernels.combine(out, [], [])
    with pytest.raises(TypeError, match=r"xs\[0\]: it is no array"):
        kernels.combine(out, [None], [1.0])
    assert not out.any()


@pytest.mark.skipif(not native.available(), reason="numpy holds the GIL as it likes")
def test_threads_may_run_kernels_at_the_same_time():
    xs = [np.full(100_000, value, dtype=np.float32) for value in range(4)]
    sums = [np.zeros(100_000, dtype=np.float32) for _ in xs]

    def work(index: int) -> None:
        for _ in range(20):
            native.accumulate(sums[index], xs[index], 1.0)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [float(total[0]) for total in sums] == [0.0, 20.0, 40.0, 60.0]
    assert all((total == total[0]).all() for total in sums)


DIGEST_PROGRAM = """
import hashlib, numpy as np
from hpcps import native
rng = np.random.default_rng(5)
digest = hashlib.sha256()
for dtype in ("float32", "float64"):
    xs = [rng.standard_normal(40_001).astype(dtype) for _ in range(3)]
    out = np.empty_like(xs[0])
    native.combine(out, xs, [0.3, 1 / 3, -2.7]); digest.update(out.tobytes())
    native.accumulate(out, xs[1], 0.1); digest.update(out.tobytes())
    native.scale(out, 1 / 7); digest.update(out.tobytes())
    native.assign(out, xs[2], 1 / 7); digest.update(out.tobytes())
    digest.update(str(native.checksum(out.view(np.uint8))).encode())
print(native.isa(), native.available(), digest.hexdigest())
"""


def run_program(program: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | env, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr


def test_every_set_of_kernels_gives_the_same_bits():
    name, used, want = run_program(DIGEST_PROGRAM, {"HPCPS_NATIVE": "off"}).split()
    assert (name, used) == ("numpy", "False")
    if not native.available():
        pytest.skip(native.why_not())
    for setting in ("portable", "auto"):
        name, used, got = run_program(DIGEST_PROGRAM, {"HPCPS_NATIVE": "", "HPCPS_ISA": setting}).split()
        assert (used, got) == ("True", want)
        assert name == "portable" or setting == "auto"


@pytest.mark.skipif(not native.available(), reason="needs the built kernels")
def test_a_wrong_instruction_set_falls_back_to_numpy_and_says_so():
    text = run_program("from hpcps import native; print(native.isa(), native.why_not())", {"HPCPS_ISA": "sse9"})
    assert text == (
        "numpy cannot choose kernels: HPCPS_ISA is 'sse9', need portable, avx2 or auto; correct or unset it\n"
    )


def test_switching_off_is_explained_and_a_wrong_setting_is_an_error():
    program = "from hpcps import native; print(native.why_not())"
    assert run_program(program, {"HPCPS_NATIVE": "off"}) == (
        "cannot use the built kernels: HPCPS_NATIVE is 'off'; unset it\n"
    )
    assert "HPCPS_NATIVE is 'maybe', need auto or off" in run_program(program, {"HPCPS_NATIVE": "maybe"})


def test_a_module_that_was_not_built_is_explained():
    program = (
        "import sys; sys.modules['hpcps._native'] = None\n"
        "from hpcps import native; print(native.available(), native.isa(), native.why_not())"
    )
    text = run_program(program, {"HPCPS_NATIVE": ""})
    assert text.startswith("False numpy cannot import hpcps._native: it was not built; install a C++17 compiler")


@pytest.mark.parametrize(
    ("error", "want"),
    [
        (ImportError("libfoo.so.1: no such file"), "cannot import hpcps._native: libfoo.so.1: no such file; install"),
        (ImportError("cannot choose kernels: a; b"), "cannot choose kernels: a; b"),
        (ModuleNotFoundError("No module named 'hpcps._native'"), "cannot import hpcps._native: it was not built"),
    ],
)
def test_a_module_that_does_not_load_leaves_numpy_and_the_first_cause(monkeypatch, error, want):
    def fail(name: str) -> None:
        raise error

    monkeypatch.setenv("HPCPS_NATIVE", "")
    monkeypatch.setattr(native.importlib, "import_module", fail)
    kernels, codecs, why_not = native._load()
    assert kernels is _native_reference
    assert codecs is _codec_reference
    assert why_not.startswith(want)

"""What codecs refuse of their arguments, with what words, and that nothing has happened before."""

from __future__ import annotations

import numpy as np
import pytest
from codec_cases import CODECS, encode, values

from hpcps.plan import Codec, CodecSpec

NUMEL = 300


def floats(numel: int = NUMEL, dtype: str = "float32") -> np.ndarray:
    return np.ones(numel, dtype=dtype)


def room(text: str = "fp16", numel: int = NUMEL, itemsize: int = 4) -> np.ndarray:
    return np.zeros(CodecSpec.parse(text).wire_bytes(numel, itemsize), dtype=np.uint8)


def misaligned(numel: int = NUMEL) -> np.ndarray:
    return np.zeros(4 * numel + 1, dtype=np.uint8)[1:].view(np.float32)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("number", [-1, 8, 9, 255])
def test_an_unknown_codec_is_refused_with_its_number(codecs, number):
    acc = np.zeros(NUMEL, dtype=np.float32)
    want = rf"unknown codec {number}, need 0 to 7; see hpcps.plan.Codec$"
    with pytest.raises(ValueError, match=f"^cannot encode x: {want}"):
        codecs.encode(number, floats(), room())
    with pytest.raises(ValueError, match=f"^cannot decode payload: {want}"):
        codecs.decode(number, room(), acc)
    with pytest.raises(ValueError, match=rf"^cannot decode_accumulate payloads\[1\]: {want}"):
        codecs.decode_accumulate(acc, [room(), room()], [2, number], [1.0, 1.0])
    assert not acc.any()


# arguments of encode, the error, and its message after "cannot encode "; None where the binding has words of its own
ENCODE = {
    "short": (
        (2, floats(), room()[1:]),
        ValueError,
        "out: 599 bytes, need 600 for 300 elements with fp16; see CodecSpec",
    ),
    "short topk": (
        (6, floats(), np.zeros(26, np.uint8), None, 3),
        ValueError,
        "out: 26 bytes, need 27 for 300 elements with topk; see CodecSpec.wire_bytes",
    ),
    "no bytes": ((2, floats(), floats()), TypeError, "out: dtype float32, need uint8; view it as uint8"),
    "signed bytes": ((2, floats(), room().view(np.int8)), TypeError, "out: dtype int8, need uint8; view it as uint8"),
    "out of two dimensions": ((2, floats(), room().reshape(2, -1)), TypeError, "out: 2 dimensions, need 1; flatten"),
    "out with holes": ((2, floats(), np.zeros(2000, np.uint8)[::2]), TypeError, "out: its elements are not contiguous"),
    "read-only out": ((2, floats(), read_only(room())), TypeError, None),
    "half": ((2, floats(dtype="float16"), room()), TypeError, "x: dtype float16, need float32 or float64; convert it"),
    "integers": ((2, floats(dtype="int32"), room()), TypeError, "x: dtype int32, need float32 or float64; convert it"),
    "double": ((2, floats(dtype="float64"), room()), TypeError, "x: dtype float64, codec fp16 needs float32; convert"),
    "x with holes": ((2, floats(600)[::2], room()), TypeError, "x: its elements are not contiguous; pass a contiguous"),
    "x misaligned": ((2, misaligned(), room()), ValueError, "x: its memory is not aligned to its elements; copy it"),
    "a list": ((2, [1.0] * NUMEL, room()), TypeError, None),
    "other byte order": ((2, floats().astype(">f4"), room()), TypeError, None),
    "long residual": (
        (2, floats(), room(), floats(301)),
        ValueError,
        "residual: 301 elements, x has 300; pass arrays of one size",
    ),
    "residual of another dtype": (
        (2, floats(), room(), floats(dtype="float64")),
        TypeError,
        "residual: dtype float64, x is float32; pass arrays of one dtype",
    ),
    "residual misaligned": ((2, floats(), room(), misaligned()), ValueError, "residual: its memory is not aligned"),
    "read-only residual": ((2, floats(), room(), read_only(floats())), TypeError, None),
    "keep of fp16": ((2, floats(), room(), None, 3), ValueError, "x: keep is 3, codec fp16 takes none; leave it out"),
    "no keep": ((6, floats(), room("none")), ValueError, "x: keep is 0, topk of 300 elements needs 1 to 300; see"),
    "large keep": (
        (6, floats(), room("none"), None, 301),
        ValueError,
        "x: keep is 301, topk of 300 elements needs 1 to",
    ),
    "negative keep": ((6, floats(), room("none"), None, -1), ValueError, "x: keep is -1, topk of 300 elements needs"),
    "keep of nothing": (
        (6, floats(0), room("none"), None, 1),
        ValueError,
        "x: keep is 1, topk of 0 elements needs 0 to 0",
    ),
}


@pytest.mark.parametrize("case", ENCODE)
def test_encode_refuses_wrong_arguments_before_any_effect(codecs, case):
    (number, x, out, *rest), kind, message = ENCODE[case]
    residual, keep = rest[0] if rest else None, rest[1] if len(rest) > 1 else 0
    before = [np.array(array) for array in (x, out, residual)]
    with pytest.raises(kind) as caught:
        codecs.encode(number, x, out, residual=residual, keep=keep)
    assert message is None or str(caught.value).startswith(f"cannot encode {message}")
    after = [np.array(array) for array in (x, out, residual)]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("text", CODECS)
def test_exactly_the_bytes_of_the_spec_are_enough_and_one_less_is_not(codecs, text):
    spec = CodecSpec.parse(text)
    for numel in (1, 255, 256, 257, 5000):
        x, out = floats(numel), room(text, numel)
        codecs.encode(int(spec.codec), x, out, keep=spec.keep(numel))
        with pytest.raises(ValueError, match=f"bytes, need {out.size} for {numel} elements"):
            codecs.encode(int(spec.codec), x, out[1:], keep=spec.keep(numel))


@pytest.mark.parametrize("number", [int(codec) for codec in Codec if codec > 1])
def test_only_values_sent_as_they_are_may_be_float64(codecs, number):
    name = Codec(number).name.lower()
    acc = floats(dtype="float64")
    with pytest.raises(TypeError, match=f"^cannot encode x: dtype float64, codec {name} needs float32; convert it"):
        codecs.encode(number, acc, room("none"), keep=0)
    with pytest.raises(TypeError, match=f"^cannot decode out: dtype float64, codec {name} needs float32; convert it"):
        codecs.decode(number, room(), acc)
    with pytest.raises(TypeError, match=f"^cannot decode_accumulate acc: dtype float64, codec {name} needs float32"):
        codecs.decode_accumulate(acc, [room()], [number], [1.0])


def test_arrays_that_share_memory_are_refused(codecs):
    buffer = np.zeros(8 * NUMEL, dtype=np.uint8)
    real = buffer.view(np.float32)
    x, payload = real[:NUMEL], buffer[4 * NUMEL - 8 : 6 * NUMEL - 8]
    with pytest.raises(ValueError, match="^cannot encode out: it shares memory with x; pass separate arrays$"):
        codecs.encode(2, x, payload)
    with pytest.raises(ValueError, match="^cannot encode residual: it shares memory with x; pass separate arrays$"):
        codecs.encode(2, x, room(), residual=x)
    with pytest.raises(ValueError, match="^cannot encode residual: it shares memory with out; pass separate arrays$"):
        codecs.encode(2, floats(), payload, residual=x)
    with pytest.raises(ValueError, match="^cannot decode payload: it shares memory with out; pass separate arrays$"):
        codecs.decode(2, payload, x)
    with pytest.raises(ValueError, match=r"^cannot decode_accumulate payloads\[1\]: it shares memory with acc; pass"):
        codecs.decode_accumulate(x, [room(), payload], [2, 2], [1.0, 1.0])
    assert not buffer.any()


def test_neighbours_in_one_buffer_are_accepted(codecs):
    buffer = np.zeros(20, dtype=np.float32)
    x, residual, out = buffer[:5], buffer[5:10], buffer.view(np.uint8)[40:50]
    x[:] = 3
    assert codecs.encode(2, x, out, residual=residual) == (10, 0)
    codecs.decode_accumulate(buffer[15:], [out], [2], [2.0])
    assert buffer[15:].tolist() == [6.0] * 5


def test_inputs_may_be_read_only(codecs):
    x = read_only(floats())
    payload = read_only(encode(codecs, "int8", x)[0])
    acc = floats()
    codecs.decode_accumulate(acc, [payload], [4], [1.0])
    codecs.decode(4, payload, acc)
    assert (acc == 1).all()


def test_outputs_may_not_be_read_only(codecs):
    acc, payload = read_only(floats()), room()
    with pytest.raises(TypeError):
        codecs.decode(2, payload, acc)
    with pytest.raises(TypeError):
        codecs.decode_accumulate(acc, [payload], [2], [1.0])
    assert (acc == 1).all()


DECODE = {
    "half": (
        (2, room(), floats(dtype="float16")),
        TypeError,
        "out: dtype float16, need float32 or float64; convert it",
    ),
    "out with holes": ((2, room(), floats(600)[::2]), TypeError, "out: its elements are not contiguous"),
    "out misaligned": ((2, room(), misaligned()), ValueError, "out: its memory is not aligned to its elements"),
    "payload of floats": (
        (2, floats(150), floats()),
        TypeError,
        "payload: dtype float32, need uint8; view it as uint8",
    ),
    "payload with holes": ((2, np.zeros(1200, np.uint8)[::2], floats()), TypeError, "payload: its elements are not"),
    "two dimensions": ((2, room().reshape(2, -1), floats()), TypeError, "payload: 2 dimensions, need 1; flatten it"),
}


@pytest.mark.parametrize("case", DECODE)
def test_decode_refuses_wrong_arguments_before_any_effect(codecs, case):
    (number, payload, out), kind, message = DECODE[case]
    before = out.copy()
    with pytest.raises(kind) as caught:
        codecs.decode(number, payload, out)
    assert message is None or str(caught.value).startswith(f"cannot decode {message}")
    assert np.array_equal(out, before)


def test_decode_accumulate_names_the_wrong_payload_and_the_wrong_count(codecs):
    acc, good = np.zeros(NUMEL, dtype=np.float32), encode(codecs, "fp16", values("normal", NUMEL))[0]
    for wrong, message in (
        (None, "it is no array; pass a list of arrays"),
        (floats(150), "dtype float32, need uint8; view it as uint8"),
        (good.reshape(2, -1), "2 dimensions, need 1; flatten it first"),
        (np.zeros(1200, np.uint8)[::2], "its elements are not contiguous; pass a contiguous array"),
    ):
        with pytest.raises(TypeError) as caught:
            codecs.decode_accumulate(acc, [good, wrong], [2, 2], [1.0, 1.0])
        assert str(caught.value) == f"cannot decode_accumulate payloads[1]: {message}"
    for lengths in ((0, 0, 0), (2, 1, 2), (2, 2, 1), (1, 2, 2), (0, 1, 1)):
        num_payloads, num_codecs, num_weights = lengths
        with pytest.raises(ValueError) as caught:
            codecs.decode_accumulate(acc, [good] * num_payloads, [2] * num_codecs, [1.0] * num_weights)
        assert str(caught.value) == (
            f"cannot decode_accumulate payloads: {num_payloads} payloads, {num_codecs} codecs and {num_weights}"
            " weights, need as many of each and at least 1; correct the lists"
        )
    assert not acc.any()


def test_codecs_may_be_given_by_name(codecs):
    """An IntEnum is a number too."""
    x, acc = floats(), floats()
    out = room("int8")
    codecs.encode(Codec.INT8, x, out)
    codecs.decode(Codec.INT8, out, acc)
    codecs.decode_accumulate(acc, [out], [Codec.INT8], [1.0])
    assert (acc == 2).all()


@pytest.mark.parametrize("number", [0, -1, 4097])
def test_a_number_of_threads_out_of_range_is_refused(codecs, number):
    before = codecs.num_threads()
    with pytest.raises(ValueError) as caught:
        codecs.set_num_threads(number)
    assert str(caught.value) == (
        f"cannot set the number of threads: {number}, need 1 to 4096; set it to the cores of this process"
    )
    assert codecs.num_threads() == before >= 1

"""CodecSpec: how codecs are written, what each payload needs at most, and what is refused."""

from __future__ import annotations

import math

import pytest

from hpcps.errors import ConfigError
from hpcps.plan import Codec, CodecSpec

NAMES = ("none", "fp32", "fp16", "bf16", "int8", "onebit", "topk", "packed")


def test_numbers_on_the_wire_stay():
    """Written out, because servers and workers of two versions must agree on them."""
    assert [(codec.name.lower(), int(codec)) for codec in Codec] == list(zip(NAMES, range(8), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_read_and_written_back(name):
    spec = CodecSpec.parse(name)
    assert spec.codec is Codec[name.upper()]
    assert str(spec) == ("topk:0.01" if name == "topk" else name)
    assert CodecSpec.parse(f"  {name.upper()} ") == spec
    assert CodecSpec.parse(str(spec)) == spec


@pytest.mark.parametrize("part", [1e-9, 0.001, 0.05, 1 / 3, 1.0])
def test_the_part_of_topk_is_read_and_written_back(part):
    spec = CodecSpec.parse(f"topk:{part}")
    assert spec == CodecSpec(codec=Codec.TOPK, keep_frac=part)
    again = CodecSpec.parse(str(spec))
    assert again.codec is Codec.TOPK
    assert math.isclose(again.keep_frac, part, rel_tol=1e-5)


@pytest.mark.parametrize(
    "text", ["", "fp8", "top-k", "topk:", "topk:few", "int8:x", "none:", "topk:0.1:0.2", "topk 0.1"]
)
def test_what_is_no_codec_is_refused_with_the_names(text):
    with pytest.raises(ConfigError) as caught:
        CodecSpec.parse(text)
    assert str(caught.value) == (
        f"cannot read codec {text!r}: need one of none, fp32, fp16, bf16, int8, onebit, topk, packed;"
        " write for example topk:0.01"
    )


@pytest.mark.parametrize("part", ["0", "-0.1", "1.5", "nan", "inf"])
def test_a_part_out_of_range_is_refused(part):
    with pytest.raises(ConfigError) as caught:
        CodecSpec.parse(f"topk:{part}")
    assert str(caught.value) == (
        f"cannot use codec topk with part {float(part):g}: need above 0 to 1 for topk and none for the others;"
        " write for example topk:0.01"
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name != "topk"])
def test_a_part_of_another_codec_is_refused(name):
    with pytest.raises(
        ConfigError, match=f"cannot use codec {name} with part 0.5: need above 0 to 1 for topk and none"
    ):
        CodecSpec.parse(f"{name}:0.5")


def test_a_topk_without_its_part_is_refused():
    with pytest.raises(ConfigError, match="cannot use codec topk with part 0: need above 0 to 1"):
        CodecSpec(codec=Codec.TOPK)


def test_which_are_lossless_and_which_are_summed_while_encoded():
    specs = [CodecSpec.parse(name) for name in NAMES]
    assert [str(spec) for spec in specs if spec.lossless] == ["none", "fp32", "packed"]
    assert [str(spec) for spec in specs if spec.sums_while_encoded] == ["int8"]


@pytest.mark.parametrize(
    ("part", "numel", "want"),
    [(0.01, 0, 0), (0.01, 1, 1), (0.01, 49, 1), (0.01, 1000, 10), (0.01, 1051, 11), (1.0, 7, 7), (1e-12, 10**9, 1)],
)
def test_how_many_elements_topk_aims_at(part, numel, want):
    assert CodecSpec(codec=Codec.TOPK, keep_frac=part).keep(numel) == want


def test_other_codecs_aim_at_no_number_of_elements():
    assert [CodecSpec.parse(name).keep(1000) for name in NAMES if name != "topk"] == [0] * 7


# numel:         0    1    255    256    257    10_007
WIRE_BYTES = {
    "none":     (0,   4,  1020,  1024,  1028,  40_028),
    "fp32":     (0,   4,  1020,  1024,  1028,  40_028),
    "fp16":     (0,   2,   510,   512,   514,  20_014),
    "bf16":     (0,   2,   510,   512,   514,  20_014),
    "int8":     (0,   2,   256,   257,   259,  10_047),
    "onebit":   (0,   5,    36,    36,    41,   1_411),
    "packed":   (0,   5,  1021,  1025,  1030,  40_068),
    "topk:0.01": (16, 19,   27,    27,    27,     400),
    "topk:1":   (16,  19,   798,   801,   804,  30_715),
}  # fmt: skip


@pytest.mark.parametrize("text", WIRE_BYTES)
def test_the_largest_payload_of_every_codec(text):
    spec = CodecSpec.parse(text)
    assert tuple(spec.wire_bytes(numel) for numel in (0, 1, 255, 256, 257, 10_007)) == WIRE_BYTES[text]


@pytest.mark.parametrize("name", NAMES)
def test_only_none_follows_the_size_of_the_shards_elements(name):
    spec = CodecSpec.parse(name)
    factor = 2 if name == "none" else 1
    assert spec.wire_bytes(1000, 8) == factor * spec.wire_bytes(1000, 4)


def test_five_bytes_a_gap_are_enough_for_few_elements_of_many():
    """One element of 2^34 needs at most five digits of seven bits, not 2^34 / 127 bytes."""
    assert CodecSpec(codec=Codec.TOPK, keep_frac=1e-12).wire_bytes(1 << 34) == 16 + 5 + 2


@pytest.mark.parametrize("name", NAMES)
def test_a_longer_shard_never_needs_less(name):
    spec = CodecSpec.parse(name)
    needs = [spec.wire_bytes(numel) for numel in range(3000)]
    assert needs == sorted(needs)

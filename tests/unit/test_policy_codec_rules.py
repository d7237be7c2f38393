"""Which rule each parameter gets, by tables."""

from __future__ import annotations

import pytest

from hpcps.config import CompressionConfig
from hpcps.errors import ConfigError
from hpcps.plan import TensorSpec
from hpcps.policy import CodecRules, auto_candidates

NAMES = ("embedding.weight", "layers.0.weight", "layers.0.bias", "head.weight", "head.bias")


def tensors(*names: str, dtype: str = "float32") -> list[TensorSpec]:
    return [TensorSpec(name=name, numel=8, dtype=dtype, param_group=0) for name in names]


def decide(*rules: str, specs: list[TensorSpec] | None = None) -> tuple[str, ...]:
    return CodecRules(CompressionConfig(rules=rules)).decide(tensors(*NAMES) if specs is None else specs)


RULES = [
    ((), ("none", "none", "none", "none", "none")),
    (("*=auto",), ("auto", "auto", "auto", "auto", "auto")),
    (("embedding.*=fp16", "*=fp32"), ("fp16", "fp32", "fp32", "fp32", "fp32")),
    (("*.bias=none", "head.*=topk:0.05", "*=INT8"), ("int8", "int8", "none", "topk:0.05", "none")),
    (("*.bias=topk",), ("none", "none", "topk:0.01", "none", "topk:0.01")),
    (("*=bf16", "head.bias=none"), ("bf16", "bf16", "bf16", "bf16", "bf16")),
    (("layers.[0-9].*=onebit",), ("none", "onebit", "onebit", "none", "none")),
]


@pytest.mark.parametrize(("rules", "expected"), RULES)
def test_the_first_rule_that_fits_wins(rules: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert decide(*rules) == expected


def test_a_pattern_that_fits_nothing_is_an_error_with_near_names() -> None:
    with pytest.raises(ConfigError) as caught:
        decide("*.bias=none", "embeding.weight=fp16")
    assert str(caught.value) == (
        "cannot use rule 'embeding.weight=fp16' of compression.rules: its pattern fits none of 5 trainable parameters;"
        " correct it, the nearest are 'embedding.weight', 'head.weight', 'layers.0.weight'"
    )
    with pytest.raises(ConfigError, match="fits none of 5 .*'embedding.weight'"):
        decide("Embedding.*=fp16")
    with pytest.raises(ConfigError, match=r"fits none of 0 trainable parameters; remove it"):
        decide("*=fp16", specs=[])


@pytest.mark.parametrize("codec", ["none", "fp32", "auto"])
def test_float64_takes_what_reads_float64(codec: str) -> None:
    assert decide(f"*={codec}", specs=tensors("w", dtype="float64")) == (codec,)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "onebit", "topk:0.1"])
def test_float64_refuses_what_reads_float32(codec: str) -> None:
    specs = [*tensors("v"), *tensors("w", dtype="float64")]
    with pytest.raises(ConfigError) as caught:
        decide(f"*={codec}", specs=specs)
    assert str(caught.value) == (
        f"cannot use rule '*={codec}' of compression.rules for parameter 'w': got {codec} for float64, need none, fp32"
        " or auto; put w=none before it"
    )
    assert decide("w=none", f"*={codec}", specs=specs) == (codec, "none")


def test_candidates_of_auto_follow_the_dtype() -> None:
    config = CompressionConfig(auto_codecs=("none", "fp32", "topk", "int8"))
    assert [str(spec) for spec in auto_candidates(config, "float32")] == ["none", "topk:0.01", "int8"]
    assert [str(spec) for spec in auto_candidates(config, "float64")] == ["none", "fp32"]
    assert [str(spec) for spec in auto_candidates(CompressionConfig(), "float64")] == ["none"]

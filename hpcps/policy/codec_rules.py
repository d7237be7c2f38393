"""Which codec each parameter's rule names. Pure: names and dtypes in, codec texts out."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from hpcps.config import CompressionConfig
from hpcps.errors import ConfigError
from hpcps.plan import Codec, CodecSpec, TensorSpec

__all__ = ["CodecRules", "auto_candidates"]

_FLOAT64_CODECS = (Codec.NONE, Codec.FP32)
"""What float64 tensors can be encoded with; all other codecs read float32."""

_NUM_NAMED = 3
"""Parameter names that an error shows."""


class CodecRules:
    """Find the rule of each parameter: the first whose pattern fits its name, ``none`` where none does."""

    def __init__(self, config: CompressionConfig) -> None:
        self._rules = tuple(zip(config.rules, config.parsed_rules(), strict=True))

    def decide(self, tensors: Sequence[TensorSpec]) -> tuple[str, ...]:
        """Name the codec of each tensor: ``none``, ``fp16``, ``topk:0.01``, ..., or ``auto``.

        Args:
            tensors: the model's trainable tensors.

        Raises:
            ConfigError: a pattern fits no tensor, or a float64 tensor has a codec that reads float32.
        """
        for rule, (pattern, _) in self._rules:
            if not any(fnmatchcase(spec.name, pattern) for spec in tensors):
                raise ConfigError(
                    f"cannot use rule {rule!r} of compression.rules: its pattern fits none of"
                    f" {len(tensors)} trainable parameters; {_nearest(pattern, tensors)}"
                )
        return tuple(self._codec_of(spec) for spec in tensors)

    def _codec_of(self, spec: TensorSpec) -> str:
        for rule, (pattern, text) in self._rules:
            if fnmatchcase(spec.name, pattern):
                if spec.dtype == "float64" and text != "auto" and CodecSpec.parse(text).codec not in _FLOAT64_CODECS:
                    raise ConfigError(
                        f"cannot use rule {rule!r} of compression.rules for parameter {spec.name!r}: got {text} for"
                        f" float64, need none, fp32 or auto; put {spec.name}=none before it"
                    )
                return text
        return "none"


def auto_candidates(config: CompressionConfig, dtype: str) -> tuple[CodecSpec, ...]:
    """What a tensor under the rule ``auto`` may be encoded with, in order of preference.

    Args:
        config: the settings.
        dtype: wire dtype of the tensor.
    """
    specs = [CodecSpec.parse(text) for text in config.auto_codecs]
    if dtype == "float64":
        return tuple(spec for spec in specs if spec.codec in _FLOAT64_CODECS)
    return tuple(spec for spec in specs if spec.codec is not Codec.FP32)  # for float32 that is none once more


def _nearest(pattern: str, tensors: Sequence[TensorSpec]) -> str:
    """A hint with the names that a mistyped pattern may have meant."""
    names = list(dict.fromkeys(spec.name for spec in tensors))
    if not names:
        return "remove it"
    near = difflib.get_close_matches(pattern, names, n=_NUM_NAMED, cutoff=0.0)
    return f"correct it, the nearest are {', '.join(repr(name) for name in near)}"

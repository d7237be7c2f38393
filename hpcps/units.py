"""Byte and second constants, and the printing and parsing of sizes. No I/O."""

from __future__ import annotations

import re

from hpcps.errors import ConfigError

__all__ = ["GiB", "KiB", "MiB", "format_bytes", "format_seconds", "parse_bytes"]

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Read a size such as ``4MiB``, ``1.5 GB`` or ``4096``.

    Raises:
        ConfigError: the text is no size, or its unit is unknown.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _FACTORS:
        raise ConfigError(
            f"cannot read size {text!r}: need a number and one of B, kB, MB, GB, KiB, MiB, GiB; write for example 4MiB"
        )
    return int(float(match[1]) * _FACTORS[match[2].lower()])


def format_bytes(num_bytes: int) -> str:
    """Print a size in the largest binary unit that leaves a number of at least one."""
    for unit, factor in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"


def format_seconds(duration_s: float) -> str:
    """Print a duration: ``1.2 ms``, ``3.4 s``, ``5m 06s`` or ``2h 05m``."""
    if duration_s < 1:
        return f"{duration_s * 1e3:.1f} ms"
    if duration_s < 60:
        return f"{duration_s:.1f} s"
    if duration_s < 3600:
        return f"{int(duration_s // 60)}m {int(duration_s % 60):02d}s"
    return f"{int(duration_s // 3600)}h {int(duration_s % 3600 // 60):02d}m"

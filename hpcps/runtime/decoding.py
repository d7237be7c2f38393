"""What decoding takes on this server, told to the workers, who choose the codecs."""

from __future__ import annotations

from collections.abc import Iterable

from hpcps.plan import Codec
from hpcps.protocol.control import DecodeCosts
from hpcps.update.accumulator import Accumulator, DecodeTime

__all__ = ["DecodeReport"]

_MIN_ELEMS = 1 << 16
"""Elements of a codec before its time is worth telling: below it, the call itself rules."""
_CHANGE_FRAC = 0.25
"""Smaller changes are not told again."""


class DecodeReport:
    """Decides when the workers should hear of new costs.

    Args:
        server: index of this server.
        interval_windows: windows between two looks.
    """

    def __init__(self, server: int, *, interval_windows: int = 64) -> None:
        self._server = server
        self._interval = interval_windows
        self._next_look = interval_windows
        self._told: dict[Codec, float] = {}

    def look(self, num_windows: int, totals: Iterable[Accumulator]) -> DecodeCosts | None:
        """What there is to tell after so many windows; None for nothing new."""
        if num_windows < self._next_look:
            return None
        self._next_look = num_windows + self._interval
        spent: dict[Codec, DecodeTime] = {}
        for total in totals:
            for codec, time in total.times.items():
                sum_ = spent.setdefault(codec, DecodeTime())
                sum_.num_elems += time.num_elems
                sum_.busy_s += time.busy_s
            total.times.clear()
        fresh = {codec: time.busy_s / time.num_elems for codec, time in spent.items() if time.num_elems >= _MIN_ELEMS}
        if not any(abs(cost - self._told.get(codec, 0.0)) > _CHANGE_FRAC * cost for codec, cost in fresh.items()):
            return None
        self._told.update(fresh)
        codecs = sorted(self._told)
        return DecodeCosts(
            server=self._server, codecs=[int(codec) for codec in codecs], elem_s=[self._told[codec] for codec in codecs]
        )

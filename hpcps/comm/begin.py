"""The begin word of a room: one int64 that says which shard lies there and which of its versions a reader may believe.

    | key, 20 bits | stay, 3 bits | span, 4 bits | version, 36 bits |

The stay counts the shards that came to the room: a reader that took a copy in one stay does not mistake a later stay of
the same shard for it. The span says how many versions before this one are whole in their copies; the first version of
a stay has none. A room in which no shard lies has all bits set.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_KEYS", "MAX_VERSION", "MOVED", "Begin"]

_VERSION_BITS, _SPAN_BITS, _STAY_BITS, _KEY_BITS = 36, 4, 3, 20
_SPAN_AT = _VERSION_BITS
_STAY_AT = _SPAN_AT + _SPAN_BITS
_KEY_AT = _STAY_AT + _STAY_BITS

MOVED = -1
"""The word of a room without a shard."""
MAX_VERSION = (1 << _VERSION_BITS) - 1
"""Two years of a thousand updates a second."""
MAX_KEYS = (1 << _KEY_BITS) - 1
"""The key with all bits set is no shard's."""
_LONGEST_SPAN = (1 << _SPAN_BITS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """What a begin word says.

    Args:
        key: the shard that lies in the room, from 0 to below ``MAX_KEYS``.
        stay: number of the stay, see ``next_stay``.
        version: the version that is published, or about to be, 0 to ``MAX_VERSION``.
        span: versions before it that are whole; a word keeps 15 at most.
    """

    key: int
    stay: int
    version: int
    span: int

    def pack(self) -> int:
        """The word."""
        span = min(self.span, _LONGEST_SPAN)
        return self.key << _KEY_AT | self.stay << _STAY_AT | span << _SPAN_AT | self.version

    @classmethod
    def unpack(cls, word: int) -> Begin:
        """Read a word; the key of ``MOVED`` is ``MAX_KEYS``."""
        return cls(
            key=word >> _KEY_AT & MAX_KEYS,
            stay=word >> _STAY_AT & ((1 << _STAY_BITS) - 1),
            version=word & MAX_VERSION,
            span=word >> _SPAN_AT & _LONGEST_SPAN,
        )

    @staticmethod
    def next_stay(stay: int) -> int:
        """Number of the stay after one, as a word keeps it."""
        return (stay + 1) % (1 << _STAY_BITS)

    def keeps(self, version: int) -> bool:
        """True if the copy of a version that was published is still whole."""
        return 0 <= self.version - version <= self.span

    @property
    def complete(self) -> int:
        """The newest version that is surely published: the first of a stay is there before its word."""
        return self.version - (self.span > 0)

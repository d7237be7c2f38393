"""All tags of hpcps, far below the smallest tag bound (32767) that MPI allows."""

from __future__ import annotations

import enum

__all__ = ["Tag"]


class Tag(enum.IntEnum):
    """Message tags on the control and data communicators."""

    PROGRESS = 66
    CONTROL = 10
    FRAME_HEAD = 100
    """Plus the slot."""
    FRAME_BODY = 400
    """Plus the slot."""
    FEEDBACK = 12
    PULL = 13
    PULLED_HEAD = 14
    PULLED_BODY = 15
    PARCEL_SIZES = 16
    PARCEL_HEAD = 17
    PARCEL_BODY = 18


MAX_SLOTS = 256
"""Slots of a ring, so that slot tags stay in their ranges."""

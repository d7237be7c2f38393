"""The exception tree. Callers branch on the type and the fields, never on the text.

Every message has the form ``cannot <do what> to <which>: <got>, <limit or need>; <what to change>``.
This module refuses to do anything but describe errors: it neither logs nor exits.
"""

from __future__ import annotations

__all__ = [
    "ChannelError",
    "ConfigError",
    "DataError",
    "DeadlineError",
    "HpcpsError",
    "LaunchError",
    "NotBuiltError",
    "PlanError",
    "PlanMismatchError",
    "ProtocolError",
]


class HpcpsError(Exception):
    """Root of all errors of this package.

    Args:
        message: the whole sentence that a user reads.
        rank: world rank that met the error, -1 where it is not known.
        key: shard key that the error is about, -1 for none.
        op: the operation under way, empty for none.
    """

    def __init__(self, message: str, *, rank: int = -1, key: int = -1, op: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.key = key
        self.op = op


class ConfigError(HpcpsError):
    """A setting is unknown, of the wrong type or out of range."""


class LaunchError(HpcpsError):
    """The launcher, the MPI library and the settings do not fit together."""


class PlanError(HpcpsError):
    """No plan exists for the facts given, for example more shares than samples."""


class PlanMismatchError(PlanError):
    """Ranks that must share a plan computed different ones."""


class ProtocolError(HpcpsError):
    """A message breaks the protocol: wrong magic, version, size, key or state."""


class ChannelError(HpcpsError):
    """The transport cannot do what was asked."""


class DeadlineError(ChannelError):
    """A wait passed its deadline; the message names rank, peer and what was waited for."""


class DataError(HpcpsError):
    """The user's data or model cannot be trained as given."""


class NotBuiltError(HpcpsError):
    """An optional part is missing; the message names the first cause and the remedy."""

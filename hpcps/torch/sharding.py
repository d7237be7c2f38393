"""The user's say in which server holds a tensor. Only asks and checks; placing is the policy's part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from hpcps.errors import ConfigError
from hpcps.plan import TensorSpec

__all__ = ["Sharding", "choose_servers"]

Sharding: TypeAlias = Callable[[str, int, float], int | None]
"""Gets a parameter's name, its elements and its updates a step; returns the index of a server, or None: any."""

_FREQUENCY = 1.0
"""Every parameter of a model is pushed once a step, also where a batch has no gradient for it."""


def choose_servers(
    specs: tuple[TensorSpec, ...], sharding: Sharding | None, *, num_servers: int
) -> tuple[TensorSpec, ...]:
    """Give each tensor the server that the user's function names.

    Args:
        specs: the tensors.
        sharding: the function; None: nothing is chosen.
        num_servers: servers of the job.

    Raises:
        ConfigError: it returned something else than None or the number of a server.
    """
    if sharding is None:
        return specs
    chosen = []
    for spec in specs:
        server = sharding(spec.name, spec.numel, _FREQUENCY)
        if server is not None and not (type(server) is int and 0 <= server < num_servers):
            raise ConfigError(
                f"cannot give parameter {spec.name!r} a server: sharding returned {server!r}, need None or a whole"
                f" number from 0 to {num_servers - 1}; correct the sharding function"
            )
        chosen.append(spec if server is None else dataclasses.replace(spec, server=server))
    return tuple(chosen)

"""Which server holds which range of the model. The starting route; moving shards is decided elsewhere."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hpcps.errors import ConfigError, DataError
from hpcps.plan import WIRE_DTYPES, Piece, Route, Shard, Space, TensorSpec
from hpcps.units import KiB

__all__ = ["PlaceShards"]

MIN_SPREAD_BYTES = 64 * KiB
"""Below this a shard is not cut just to give every server one: the message's latency would rule."""


class PlaceShards:
    """Cut the flat space of each wire dtype and codec rule into shards and place them on servers.

    Small tensors share a shard and big ones are cut. Shards of a space are equal within one element.
    The largest shards are placed first, each on the server with the fewest bytes so far.

    Source: R. L. Graham, SIAM J. Appl. Math. 17 (1969): longest first, within 4/3 of the best split.

    Args:
        num_servers: servers, at least 1; more than there are shards is legal.
        shard_bytes: largest shard, at least one element.
    """

    def __init__(self, num_servers: int, *, shard_bytes: int) -> None:
        if num_servers < 1:
            raise ConfigError(f"cannot accept server_num: got {num_servers}, need at least 1; pass --server-num 1")
        largest = max(WIRE_DTYPES.values())
        if shard_bytes < largest:
            raise ConfigError(
                f"cannot accept comm.shard_bytes: got {shard_bytes} B, need at least {largest} B; raise it"
            )
        self._num_servers = num_servers
        self._shard_bytes = shard_bytes

    def decide(self, tensors: Sequence[TensorSpec]) -> Route:
        """Build the route of epoch 0.

        Keys follow the first tensor of each shard: backward passes finish gradients roughly in the
        reverse order of tensors, so that shards are complete from the last key to the first.

        Args:
            tensors: the model's trainable tensors in registration order.

        Raises:
            DataError: a tensor has a dtype that has no wire form, or a negative size.
        """
        for spec in tensors:
            if spec.dtype not in WIRE_DTYPES or spec.numel < 0:
                raise DataError(
                    f"cannot route tensor {spec.name!r}: got {spec.numel} elements of {spec.dtype}, need 0 or more"
                    f" of {' or '.join(sorted(WIRE_DTYPES))}; convert it before the optimizer is made"
                )
        ranges: list[tuple[Space, int, tuple[Piece, ...]]] = []
        for space in sorted({spec.space for spec in tensors}):
            ranges += [(space, begin, pieces) for begin, pieces in self._cut(tensors, space)]
        ranges.sort(key=lambda cut: (cut[2][0].tensor, cut[0], cut[1]))
        sizes = [sum(piece.numel for piece in pieces) for _, _, pieces in ranges]
        bytes_of = [size * WIRE_DTYPES[dtype] for size, ((dtype, _, _), _, _) in zip(sizes, ranges, strict=True)]
        servers = _least_loaded(bytes_of, self._num_servers)
        shards = tuple(
            Shard(
                key=key,
                server=servers[key],
                dtype=dtype,
                begin=begin,
                numel=sizes[key],
                pieces=pieces,
                codec=codec,
            )
            for key, ((dtype, codec, _), begin, pieces) in enumerate(ranges)
        )
        return Route(epoch=0, num_servers=self._num_servers, shards=shards)

    def _num_shards(self, numel: int, itemsize: int) -> int:
        """Shards of a space: as few as the limit allows, but one a server where they stay large enough."""
        by_limit = -(-numel // (self._shard_bytes // itemsize))
        by_spread = min(self._num_servers, numel * itemsize // MIN_SPREAD_BYTES)
        return max(by_limit, by_spread)

    def _cut(self, tensors: Sequence[TensorSpec], space: Space) -> list[tuple[int, tuple[Piece, ...]]]:
        """First element and pieces of each shard of one space."""
        numel = sum(spec.numel for spec in tensors if spec.space == space)
        num_shards = self._num_shards(numel, WIRE_DTYPES[space[0]])
        bounds = [numel * shard // num_shards for shard in range(num_shards + 1)] if num_shards else [0]
        cut: list[list[Piece]] = [[] for _ in range(num_shards)]
        position, shard = 0, 0
        for index, spec in enumerate(tensors):
            start = 0
            while spec.space == space and start < spec.numel:
                stop = min(spec.numel, start + bounds[shard + 1] - position)
                cut[shard].append(Piece(tensor=index, start=start, stop=stop, offset=position - bounds[shard]))
                position += stop - start
                start = stop
                shard += position == bounds[shard + 1]
        return [(bounds[shard], tuple(pieces)) for shard, pieces in enumerate(cut)]


def _least_loaded(sizes: Sequence[int], num_servers: int) -> list[int]:
    """Server of each shard: the largest first, onto the least loaded; ties by key and by server."""
    loads = [(0, server) for server in range(num_servers)]
    servers = [0] * len(sizes)
    for key in sorted(range(len(sizes)), key=lambda key: (-sizes[key], key)):
        load, server = loads[0]
        servers[key] = server
        heapq.heapreplace(loads, (load + sizes[key], server))
    return servers

"""Which server holds which range of the model at first. Moving shards later is `hpcps.policy.rebalance`'s part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hpcps.errors import ConfigError, DataError, PlanError
from hpcps.plan import WIRE_DTYPES, Piece, Route, Shard, Space, TensorSpec
from hpcps.units import KiB, format_bytes

__all__ = ["HELD_COPIES", "PlaceShards", "even_rates"]

MIN_SPREAD_BYTES = 64 * KiB
"""Below this a shard is not cut just to give every server one: the message's latency would rule."""

LIKE_FACTOR = 1.25
"""Servers whose rates are within this factor of the quickest of them count as equal: so far do measurements of equal
servers differ on a busy host."""

HELD_COPIES = 8
"""What a shard takes on its server, in its own bytes: values, a window's sum and its mean, two moments, and published
copies, of which there are three by default."""


def even_rates(rates: Sequence[float]) -> list[float]:
    """Rates without the differences that are no more than noise.

    From the quickest server down, those within 1.25 times of it form a class and get its mean; then the next.
    """
    even = [0.0] * len(rates)
    left = sorted(range(len(rates)), key=lambda server: (-rates[server], server))
    while left:
        alike = [server for server in left if rates[server] * LIKE_FACTOR >= rates[left[0]]]
        for server in alike:
            even[server] = sum(rates[each] for each in alike) / len(alike)
        left = left[len(alike) :]
    return even


class PlaceShards:
    """Cut the flat space of each wire dtype, codec rule and chosen server into shards and place them on servers.

    Small tensors share a shard and big ones are cut. Shards of a space are equal within one element. Every shard is
    pushed once a step, so its load is its bytes. The largest shards are placed first, each on the server that would be
    through first with its bytes at its rate; those whose server the user chose come before all others.

    Source: R. L. Graham, SIAM J. Appl. Math. 17 (1969), longest first; on machines of unlike speeds T. Gonzalez,
        O. Ibarra, S. Sahni, SIAM J. Comput. 6 (1977): within 2 times the best split, in practice far less.

    Args:
        num_servers: servers, at least 1; more than there are shards is legal.
        shard_bytes: largest shard, at least one element.
        rates: bytes that each server takes in a second, above 0; those within 1.25 times of each other count as equal.
            Empty: all equal.
        servers: those that hold shards, beside shards that the user gave to others; empty: all.
        memory: bytes that each server may use, 0: unknown; empty: all unknown. A shard takes 8 times its own bytes.

    Raises:
        ConfigError: a setting is out of range.
    """

    def __init__(
        self,
        num_servers: int,
        *,
        shard_bytes: int,
        rates: Sequence[float] = (),
        servers: Sequence[int] = (),
        memory: Sequence[int] = (),
    ) -> None:
        if num_servers < 1:
            raise ConfigError(f"cannot accept server_num: got {num_servers}, need at least 1; pass --server-num 1")
        largest = max(WIRE_DTYPES.values())
        if shard_bytes < largest:
            raise ConfigError(
                f"cannot accept comm.shard_bytes: got {shard_bytes} B, need at least {largest} B; raise it"
            )
        if not all(0 <= server < num_servers for server in servers):
            raise ConfigError(
                f"cannot accept routing.servers: got {list(servers)}, need numbers from 0 to {num_servers - 1};"
                " correct it or raise server_num"
            )
        self._num_servers = num_servers
        self._shard_bytes = shard_bytes
        self._rates = even_rates(rates) if rates else [1.0] * num_servers
        self._servers = sorted(servers) or list(range(num_servers))
        self._memory = list(memory) or [0] * num_servers

    def decide(self, tensors: Sequence[TensorSpec]) -> Route:
        """Build the route of epoch 0.

        Keys follow the first tensor of each shard: backward passes finish gradients roughly in the
        reverse order of tensors, so that shards are complete from the last key to the first.

        Args:
            tensors: the model's trainable tensors in registration order.

        Raises:
            DataError: a tensor has a dtype that has no wire form, a negative size, or a server that is not there.
            PlanError: no server has the memory for a shard; names it, its need, and the most that is free.
        """
        for spec in tensors:
            if spec.dtype not in WIRE_DTYPES or spec.numel < 0:
                raise DataError(
                    f"cannot route tensor {spec.name!r}: got {spec.numel} elements of {spec.dtype}, need 0 or more"
                    f" of {' or '.join(sorted(WIRE_DTYPES))}; convert it before the optimizer is made"
                )
            if spec.server >= self._num_servers:
                raise DataError(
                    f"cannot route tensor {spec.name!r}: got server {spec.server}, need one below {self._num_servers};"
                    " correct the sharding function"
                )
        ranges: list[tuple[Space, int, tuple[Piece, ...]]] = []
        for space in sorted({spec.space for spec in tensors}):
            ranges += [(space, begin, pieces) for begin, pieces in self._cut(tensors, space)]
        ranges.sort(key=lambda cut: (cut[2][0].tensor, cut[0], cut[1]))
        sizes = [sum(piece.numel for piece in pieces) for _, _, pieces in ranges]
        bytes_of = [size * WIRE_DTYPES[dtype] for size, ((dtype, _, _), _, _) in zip(sizes, ranges, strict=True)]
        names = [tensors[pieces[0].tensor].name for _, _, pieces in ranges]
        servers = self._assign(bytes_of, [chosen for (_, _, chosen), _, _ in ranges], names)
        rooms = _rooms(servers)
        shards = tuple(
            Shard(
                key=key,
                server=servers[key],
                dtype=dtype,
                begin=begin,
                numel=sizes[key],
                pieces=pieces,
                codec=codec,
                pinned=chosen >= 0,
                room=rooms[key],
            )
            for key, ((dtype, codec, chosen), begin, pieces) in enumerate(ranges)
        )
        return Route(epoch=0, num_servers=self._num_servers, shards=shards)

    def _num_shards(self, numel: int, itemsize: int, *, chosen: bool) -> int:
        """Shards of a space: as few as the limit allows, but one a server where they stay large enough."""
        by_limit = -(-numel // (self._shard_bytes // itemsize))
        num_servers = 1 if chosen else self._num_servers
        by_spread = min(num_servers, numel * itemsize // MIN_SPREAD_BYTES)
        return max(by_limit, by_spread)

    def _cut(self, tensors: Sequence[TensorSpec], space: Space) -> list[tuple[int, tuple[Piece, ...]]]:
        """First element and pieces of each shard of one space."""
        numel = sum(spec.numel for spec in tensors if spec.space == space)
        num_shards = self._num_shards(numel, WIRE_DTYPES[space[0]], chosen=space[2] >= 0)
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

    def _assign(self, sizes: Sequence[int], chosen: Sequence[int], names: Sequence[str]) -> list[int]:
        """Server of each shard: the chosen ones, then the largest first; ties by key and by server.

        Args:
            sizes: bytes of each shard.
            chosen: its server, or -1.
            names: its first tensor, for errors.
        """
        loads, held = [0] * self._num_servers, [0] * self._num_servers
        servers = [0] * len(sizes)

        def fits(server: int, need: int) -> bool:
            return self._memory[server] == 0 or held[server] + need <= self._memory[server]

        for key in sorted(range(len(sizes)), key=lambda key: (chosen[key] < 0, -sizes[key], key)):
            need = sizes[key] * HELD_COPIES
            asked = self._servers if chosen[key] < 0 else [chosen[key]]
            able = [server for server in asked if fits(server, need)]
            if not able:
                most, server = max((self._memory[server] - held[server], -server) for server in asked)
                raise PlanError(
                    f"cannot place shard {key} (from tensor {names[key]!r}): needs {format_bytes(need)} for"
                    f" {format_bytes(sizes[key])} of values, most free is {format_bytes(most)} (server {-server});"
                    " give the servers more memory, or raise server_num",
                    key=key,
                )
            server = min(able, key=lambda server: ((loads[server] + sizes[key]) / self._rates[server], server))
            servers[key] = server
            loads[server] += sizes[key]
            held[server] += need
        return servers


def _rooms(servers: Sequence[int]) -> list[int]:
    """Room of each shard: those of one server lie in key order."""
    counts: Counter[int] = Counter()
    rooms = []
    for server in servers:
        rooms.append(counts[server])
        counts[server] += 1
    return rooms

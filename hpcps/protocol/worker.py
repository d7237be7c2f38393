"""The worker's half of the protocol: its clock, the versions it computes on, how far ahead it may be."""

from __future__ import annotations

from hpcps.errors import ProtocolError
from hpcps.plan import Codec, Group, Shard
from hpcps.protocol.messages import Kind, PushHeader

__all__ = ["WorkerProtocol", "owner_of"]


def owner_of(shard: Shard, group: Group) -> int:
    """World rank of the member that pushes a shard for its group: shards are spread over the members."""
    return group.workers[shard.key % len(group.workers)]


class WorkerProtocol:
    """Clock and versions of one worker.

    Args:
        rank: world rank.
        num_keys: shards of the route.
    """

    def __init__(self, rank: int, *, num_keys: int) -> None:
        self.rank = rank
        self.clock = 0
        self._newest = [-1] * num_keys
        self._settled = [0] * num_keys
        self._used = [-1] * num_keys
        self._since_clock = 1

    def on_notice(self, key: int, *, version: int, clock: int) -> None:
        """A server published a version and settled the group's pushes up to a clock."""
        if not 0 <= key < len(self._newest):
            raise ProtocolError(
                f"cannot accept a notice: key {key}, need 0 to {len(self._newest) - 1}; run one plan on all ranks",
                rank=self.rank,
                key=key,
            )
        self._newest[key] = max(self._newest[key], version)
        self._settled[key] = max(self._settled[key], clock)

    def newest(self, key: int) -> int:
        """Newest version heard of, -1 for none."""
        return self._newest[key]

    def used(self, key: int) -> int:
        """Version of the parameters now in the model."""
        return self._used[key]

    def on_pulled(self, key: int, *, version: int) -> None:
        """The model's parameters of a shard are now of this version."""
        self._used[key] = version

    def loaded(self) -> bool:
        """True once every shard has been published."""
        return min(self._newest, default=0) >= 0

    def settled(self, key: int) -> int:
        """Newest clock of the group that a shard has settled."""
        return self._settled[key]

    def settled_through(self, clock: int) -> bool:
        """True if every shard has settled the group's pushes up to a clock."""
        return min(self._settled, default=clock) >= clock

    def on_regroup(self, clock: int) -> None:
        """A new grouping begins after a clock, the largest of all workers'; all that was pushed before is settled."""
        self.clock = clock
        self._settled = [clock] * len(self._settled)
        self._since_clock = clock + 1

    def advance(self) -> int:
        """Begin the next step; returns its clock, from 1."""
        self.clock += 1
        return self.clock

    def header(
        self,
        shard: Shard,
        kind: Kind,
        *,
        group: Group,
        generation: int,
        num_groups: int,
        weight: float,
        share_frac: float,
        sample_cost: float = 1.0,
        meta_bytes: int,
        payload_bytes: int,
        codec: Codec = Codec.NONE,
        checksum: int = 0,
    ) -> PushHeader:
        """The header of this step's push of a shard."""
        return PushHeader(
            kind=kind,
            codec=codec,
            key=shard.key,
            route_epoch=shard.epoch,
            generation=generation,
            group=group.index,
            num_groups=num_groups,
            sender=self.rank,
            clock=0 if kind is Kind.INIT else self.clock,
            since_clock=self._since_clock,
            base_version=max(0, self._used[shard.key]),
            weight=weight,
            share_frac=share_frac,
            sample_cost=sample_cost,
            numel=shard.numel,
            meta_bytes=meta_bytes,
            payload_bytes=payload_bytes,
            checksum=checksum,
        )

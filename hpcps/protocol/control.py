"""Control messages: small, rare, two-sided. What each says; ``control_json`` reads and writes them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "BarrierEnter",
    "BarrierLeave",
    "ControlMessage",
    "DecodeCosts",
    "Done",
    "DrainTo",
    "EndOfData",
    "GuardLevel",
    "JoinGroup",
    "LoaderOpen",
    "Move",
    "Moved",
    "Order",
    "OrderRequest",
    "Register",
    "RegisterReply",
    "RouteChange",
    "ServerFacts",
    "ServerLoad",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """Worker to every server: the plan's digest; the first worker adds the plan itself.

    Args:
        rank: world rank of the worker.
        digest: hash of route and rule.
        route: JSON of the route, empty from all but the first worker.
        tensors: JSON of the tensors, likewise.
        rule: JSON of the server-side rule, likewise.
    """

    rank: int
    digest: str
    route: str
    tensors: str
    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterReply:
    """Server to worker: empty refusal means that the data path may be opened."""

    refusal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinGroup:
    """Worker to every server: from now on a member of this group, so tell it that group's clocks."""

    rank: int
    generation: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCosts:
    """Server to worker: what adding one element of a payload takes there.

    Args:
        server: index of the server.
        codecs: numbers of the codecs that were measured, each once.
        elem_s: seconds an element, for each of them.
    """

    server: int
    codecs: list[int]
    elem_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Server to every worker, before it registers: what this server can do.

    Args:
        server: index of the server.
        bytes_per_s: gradient bytes that it takes in a second, as measured when it started.
        memory_bytes: memory that it may use, 0: unknown.
    """

    server: int
    bytes_per_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """Server to coordinator, every ``routing.interval_steps`` versions: what it did since the last one.

    Args:
        server: index of the server.
        version: newest version of any of its shards.
        seconds: length of the interval.
        busy_s: seconds in which it worked, as opposed to waited.
        cpu_s: seconds of processor that it had.
        raw_bytes: gradient bytes that it took in, counted as they were before a codec.
        keys: shards that it holds.
        pushes: pushes of each of them.
        queue: largest number of frames found waiting at once.
        memory_bytes: memory that it may still use, 0: unknown.
        num_pushes: pushes let into windows.
        num_late: those of them that missed the window of their own step.
        offset_s: median seconds between the opening of a window and a push.
        staleness: mean staleness of pushes, in versions.
        agreement: mean cosine between the gradients of one window, 1 where none was compared.
    """

    server: int
    version: int
    seconds: float
    busy_s: float
    cpu_s: float
    raw_bytes: int
    keys: list[int]
    pushes: list[int]
    queue: int
    memory_bytes: int
    num_pushes: int
    num_late: int
    offset_s: float
    staleness: float
    agreement: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainTo:
    """Worker to coordinator: from now on only these servers shall hold shards."""

    rank: int
    servers: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Coordinator to a server that holds a shard: give it to another one.

    Args:
        key: the shard.
        epoch: epoch of the route in which the other one has it.
        target: index of the server that gets it.
        room: the room there.
    """

    key: int
    epoch: int
    target: int
    room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The server that got a shard to the coordinator: it holds it, and has published its version.

    Args:
        key: the shard.
        epoch: epoch of the route.
        server: index of this server.
        num_bytes: what came over: values, optimizer state and sums.
        seconds: from the order to now, on the clock of the giving server's parcel; 0 where unknown.
    """

    key: int
    epoch: int
    server: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteChange:
    """Coordinator to workers: where shards are from an epoch on.

    Args:
        epoch: epoch of the route.
        keys: shards that are elsewhere now.
        servers: index of the server of each.
        rooms: its room there.
    """

    epoch: int
    keys: list[int]
    servers: list[int]
    rooms: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardLevel:
    """Coordinator to every server: how close to sync windows have to be, see ``policy.guard``."""

    level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOpen:
    """Worker to coordinator: a loader with this many samples and this global batch.

    Args:
        rank: world rank of the worker.
        loader: index of the loader.
        num_samples: samples of an epoch.
        global_batch: samples of one full step.
        trains: its batches are trained on.
        costs: digest of the samples' costs or features, the same on every worker; empty: all cost the same.
        num_features: numbers by which costs are learned, a sample, the first of them always 1, each with a mean of 1
            over all samples; 0: costs are given, or all the same.
    """

    rank: int
    loader: int
    num_samples: int
    global_batch: int
    trains: bool
    costs: str = ""
    num_features: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRequest:
    """Worker to coordinator: the batch at a position, with what was measured since the last request.

    Args:
        rank: world rank of the worker.
        loader: index of the loader.
        epoch: epoch, from 0.
        index: batch of the epoch, from 0.
        num_epochs: epochs that the job runs, 0 if unknown.
        timed: pairs (work, seconds) of finished steps, flattened; work is samples, or their cost where costs are known,
            in units of a mean sample.
        num_samples: samples of finished steps.
        features: where costs are learned, the sum of each feature over the samples of each timed step, flattened.
        link_s: seconds for which this worker's own link was busy in each timed step; empty: unknown.
        links: four numbers a server, from time to time: latency and bytes a second of its pushes, then of its pulls;
            0: unknown.
        cpu_wait_frac: part of the compute time in which it waited for a processor that others used, 0 to 1.
        max_samples: samples that its memory was found to hold, 0: unknown.
        done: batches of this epoch that it is through with.
        held: batches that its loading processes take before they hand out the first.
        leaves: it breaks the epoch off, which ends here for its group.
        batches_per_step: most batches that its script made one step of.
        logged: names of logged values.
        sums: weighted sum of each logged value.
        weights: weight of each logged value.
        staleness: largest staleness seen in those steps, in versions.
    """

    rank: int
    loader: int
    epoch: int
    index: int
    num_epochs: int
    timed: list[float]
    logged: list[str]
    sums: list[float]
    weights: list[float]
    staleness: int
    num_samples: int = 0
    features: list[float] = dataclasses.field(default_factory=list)
    link_s: list[float] = dataclasses.field(default_factory=list)
    links: list[float] = dataclasses.field(default_factory=list)
    cpu_wait_frac: float = 0.0
    max_samples: int = 0
    done: int = 0
    held: int = 0
    leaves: bool = False
    batches_per_step: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Coordinator to worker: which samples of the epoch's permutation are its own in one batch.

    Args:
        loader: index of the loader.
        epoch: epoch of the batch.
        index: batch of the epoch.
        end: the epoch is over for this group; the other fields are void.
        start: position of the worker's first sample in the permutation.
        count: the worker's samples, may be 0.
        group_count: samples of the whole group in this batch.
        num_idle: members of the group without a sample in it.
        share_frac: the group's part of a full global batch.
        generation: grouping that this batch belongs to.
        groups: that grouping's groups as lists of world ranks; empty where the worker has been told before.
        fixed_s: where samples have costs, the fixed seconds of a step of each member of the group. Then ``start`` is
            the first sample of the group, and every member finds its own samples among ``group_count`` by their cost.
            Empty where these and the fields below are those of the worker's last order of this loader.
        unit_s: likewise the seconds that a sample of mean cost adds for each member.
        caps: likewise the samples that each member may have at most, 0: no cap; empty: no caps.
        member: place of the worker in its group, counted from 0.
        cost_weights: where costs are learned, the weight of each feature, in units of a mean sample; empty: not yet.
    """

    loader: int
    epoch: int
    index: int
    end: bool
    start: int
    count: int
    group_count: int
    num_idle: int
    share_frac: float
    generation: int
    groups: list[list[int]]
    fixed_s: list[float] = dataclasses.field(default_factory=list)
    unit_s: list[float] = dataclasses.field(default_factory=list)
    caps: list[int] = dataclasses.field(default_factory=list)
    member: int = 0
    cost_weights: list[float] = dataclasses.field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfData:
    """Group's first worker to every server: no push after this clock until a later one comes."""

    generation: int
    group: int
    clock: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierEnter:
    """Worker to coordinator: arrived at the n-th barrier."""

    rank: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierLeave:
    """Coordinator to workers: all have arrived."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Worker to every server: will send nothing more."""

    rank: int


ControlMessage: TypeAlias = (
    Register
    | RegisterReply
    | JoinGroup
    | DecodeCosts
    | ServerFacts
    | ServerLoad
    | DrainTo
    | Move
    | Moved
    | RouteChange
    | GuardLevel
    | LoaderOpen
    | OrderRequest
    | Order
    | EndOfData
    | BarrierEnter
    | BarrierLeave
    | Done
)

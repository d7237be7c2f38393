"""What happened in a run, as typed values: one class a kind of event. Reads nothing; ``events.py`` does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcps.config import SpeedChange
from hpcps.errors import DataError

__all__ = [
    "CapacityEvent",
    "ChangeEvent",
    "CodecEvent",
    "CostsEvent",
    "GroupingEvent",
    "GuardEvent",
    "LinksEvent",
    "MovedEvent",
    "RouteEvent",
    "RunEvent",
    "RunEvents",
    "ServerEvent",
    "SharesEvent",
    "StepEvent",
    "SummaryEvent",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """One step of one worker.

    Args:
        t_s: when the step ended.
        rank: world rank of the worker.
        step: the worker's own step number, from 1.
        epoch: epoch of the samples, from 0.
        num_samples: samples of this worker in this step.
        compute_s: forward and backward, emulated time included.
        wait_s: time spent waiting for other ranks.
        step_s: from the end of the step before to the end of this one.
        staleness: versions between the parameters used and those on the servers.
        push_bytes: put into the servers' memory in this step.
        pull_bytes: read from it.
        raw_bytes: what the payloads of the pushes would have been without a codec.
    """

    t_s: float
    rank: int
    step: int
    epoch: int
    num_samples: int
    compute_s: float
    wait_s: float
    step_s: float
    staleness: float
    push_bytes: int
    pull_bytes: int
    raw_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesEvent:
    """Shares that hold from a step on: ``counts[i]`` samples for rank ``workers[i]``."""

    t_s: float
    step: int
    counts: tuple[int, ...]
    workers: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupingEvent:
    """The groups of a generation, each the world ranks of its workers.

    The rates are what the workers would do in the groups before and in these, 0 where unknown.
    """

    t_s: float
    generation: int
    groups: tuple[tuple[int, ...], ...]
    reason: str
    before_samples_per_s: float = 0.0
    samples_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityEvent:
    """Fitted step time of each worker: ``fixed_s[i] + per_sample_s[i] * samples`` for rank ``workers[i]``."""

    t_s: float
    workers: tuple[int, ...]
    fixed_s: tuple[float, ...]
    per_sample_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksEvent:
    """Latency and rate of pushes to and pulls from each server, 0: unknown, for the worker of a world rank."""

    t_s: float
    worker: int
    push_latency_s: tuple[float, ...]
    push_bytes_per_s: tuple[float, ...]
    pull_latency_s: tuple[float, ...]
    pull_bytes_per_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeEvent:
    """A worker was found to be slower or faster.

    Args:
        t_s: when it was found.
        worker: its world rank.
        ratio: step time now over what was expected.
        cpu_wait_frac: part of its time in which others used its processor, 0 to 1.
        steps: steps since the change, as far as it can be told.
        reason: the finding with its numbers.
    """

    t_s: float
    worker: int
    ratio: float
    cpu_wait_frac: float
    steps: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsEvent:
    """What samples cost was learned anew: the weight of each feature, in units of a mean sample."""

    t_s: float
    weights: tuple[float, ...]
    error: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteEvent:
    """It was decided that shards change their servers, or that some should and cannot.

    Args:
        t_s: when.
        look: number of the look at the servers' load, from 1; 0 before the first.
        keys: shards that move.
        sources: the server of each.
        servers: its server to be.
        num_bytes: of their values.
        stuck: shards that should leave their server and cannot.
        reason: why, with numbers.
    """

    t_s: float
    look: int
    keys: tuple[int, ...]
    sources: tuple[int, ...]
    servers: tuple[int, ...]
    num_bytes: int
    stuck: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedEvent:
    """A shard is at its new server: what came over, and how long that took."""

    t_s: float
    epoch: int
    key: int
    server: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardEvent:
    """The guard rail went to another level: 0 is as the mode says, higher ones are closer to sync."""

    t_s: float
    step: int
    level: int
    before: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecEvent:
    """A worker encodes a shard in another way from a step on.

    Args:
        t_s: when it was decided.
        rank: world rank of the worker.
        step: the worker's own step number.
        key: shard.
        server: index of its server.
        codec: the codec from now on.
        codec_before: the one before.
        link_bytes_per_s: rate of the link as estimated.
        reason: the choice with its numbers.
    """

    t_s: float
    rank: int
    step: int
    key: int
    server: int
    codec: str
    codec_before: str
    link_bytes_per_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvent:
    """A server's counters at the end: ``raw_bytes`` without a codec; staleness in versions over its pushes.

    A push counts where its shard is, not where it was sent on. Weights are samples or what the script weighs by;
    ``num_moves`` counts shards given to other servers, ``num_relayed`` frames sent on to where their shard is;
    ``cost_bias`` is the mean cost of a sample as applied over that as pushed, less 1.
    """

    rank: int
    num_pushes: int
    num_windows: int
    num_refused: int
    payload_bytes: int
    raw_bytes: int
    staleness_mean: float
    staleness_max: float
    queue_max: int
    pushed_weight: float = 0.0
    applied_weight: float = 0.0
    refused_weight: float = 0.0
    num_moves: int = 0
    moved_bytes: int = 0
    num_relayed: int = 0
    cost_bias: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """How the run was set up. ``speeds`` are the emulated ones, empty where none were; ``changes`` their script."""

    sync_mode: str
    heterogeneous: bool
    speeds: tuple[float, ...]
    changes: tuple[SpeedChange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryEvent:
    """The numbers that a training script reported at its end, by name."""

    rank: int
    values: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvents:
    """All events of a run, steps in order of (rank, step), the others in order of time."""

    folder: Path
    steps: tuple[StepEvent, ...]
    shares: tuple[SharesEvent, ...] = ()
    groupings: tuple[GroupingEvent, ...] = ()
    capacities: tuple[CapacityEvent, ...] = ()
    links: tuple[LinksEvent, ...] = ()
    changes: tuple[ChangeEvent, ...] = ()
    costs: tuple[CostsEvent, ...] = ()
    routes: tuple[RouteEvent, ...] = ()
    moves: tuple[MovedEvent, ...] = ()
    guards: tuple[GuardEvent, ...] = ()
    codecs: tuple[CodecEvent, ...] = ()
    servers: tuple[ServerEvent, ...] = ()
    runs: tuple[RunEvent, ...] = ()
    summaries: tuple[SummaryEvent, ...] = ()

    def metric(self, name: str) -> float:
        """A number that the training script reported; the last one where it did so twice.

        Raises:
            DataError: no summary holds that name.
        """
        values = {key: value for summary in self.summaries for key, value in summary.values}
        if name not in values:
            raise DataError(
                f"cannot find metric {name!r} of run {str(self.folder)!r}: got {sorted(values)}, need that name;"
                f" call job.summary({name}=...) at the end of the script"
            )
        return values[name]

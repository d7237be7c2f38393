"""Settings of a run: frozen dataclasses that check themselves. Reads no file and no environment.

Each field's ``doc`` is one line with unit and range; the command line's help prints it.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass
from typing import Any, TypeVar

from hpcps.errors import ConfigError
from hpcps.plan import Codec, CodecSpec
from hpcps.units import MiB

__all__ = [
    "CapacityConfig",
    "CommConfig",
    "CompressionConfig",
    "DataConfig",
    "EmulateConfig",
    "GroupingConfig",
    "GuardConfig",
    "LogConfig",
    "PartitionConfig",
    "RoutingConfig",
    "RunConfig",
    "SpeedChange",
    "StalenessConfig",
    "WindowConfig",
    "describe",
]

T = TypeVar("T")


def _field(default: T, doc: str) -> T:
    """A dataclass field with its line of documentation."""
    value: T = dataclasses.field(default=default, metadata={"doc": doc})
    return value


def describe(section: Any, name: str) -> str:
    """The line of documentation of one field."""
    fields = {field.name: field for field in dataclasses.fields(section)}
    return str(fields[name].metadata.get("doc", ""))


def _need(ok: bool, setting: str, got: object, need: str, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"cannot accept {setting}: got {got!r}, need {need}; {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityConfig:
    """How the speed of each worker is measured."""

    warmup_steps: int = _field(20, "timed steps before the first fit, at least 20")
    drop_steps: int = _field(2, "first steps that are not timed at all, at least 1")
    interval_steps: int = _field(100, "steps between two regular refits, at least 1")
    dead_band_frac: float = _field(0.05, "smaller changes of shares are not made, 0 to 1")
    change_frac: float = _field(
        0.15, "step time off by more than this is told as a change; smaller ones are followed in silence"
    )
    history_steps: int = _field(64, "timed steps kept for each worker, at least 20; warmup_steps if that is more")
    prior: tuple[float, ...] = _field((), "relative speeds by worker, in rank order; empty: unknown")
    follow: bool = _field(True, "shares follow speeds while it runs; off: they stay as the warm-up found them")

    def __post_init__(self) -> None:
        _need(self.warmup_steps >= 20, "capacity.warmup_steps", self.warmup_steps, "at least 20", "raise it")
        _need(self.drop_steps >= 1, "capacity.drop_steps", self.drop_steps, "at least 1", "raise it")
        _need(self.interval_steps >= 1, "capacity.interval_steps", self.interval_steps, "at least 1", "raise it")
        _need(0 <= self.dead_band_frac < 1, "capacity.dead_band_frac", self.dead_band_frac, "0 to 1", "try 0.05")
        _need(self.change_frac > 0, "capacity.change_frac", self.change_frac, "above 0", "try 0.15")
        _need(self.history_steps >= 20, "capacity.history_steps", self.history_steps, "at least 20", "raise it")
        _need(all(v > 0 for v in self.prior), "capacity.prior", self.prior, "positive speeds", "write 3:2:1:1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionConfig:
    """Bounds on a worker's share of a batch."""

    min_share: int = _field(
        1, "samples that every worker gets at least; from 2 on, a tail too small for it joins the batch before"
    )
    max_share: int = _field(0, "samples that a worker gets at most; 0: no cap")
    caps: tuple[int, ...] = _field(
        (), "samples that each worker's memory holds, in rank order, 0: no cap of its own; empty: no caps"
    )

    def __post_init__(self) -> None:
        _need(self.min_share >= 0, "partition.min_share", self.min_share, "0 or more", "raise it")
        _need(
            self.max_share == 0 or self.max_share >= max(1, self.min_share),
            "partition.max_share",
            self.max_share,
            f"0 or at least partition.min_share = {self.min_share}",
            "raise it",
        )
        _need(all(cap >= 0 for cap in self.caps), "partition.caps", self.caps, "0 or more each", "write 64:64:0:0")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupingConfig:
    """When workers change groups in hybrid mode."""

    regroup: bool = _field(True, "groups follow the speeds while it runs; off: they stay as first found")
    hold_steps: int = _field(50, "steps of every worker between two changes of groups, at least 1")
    margin_frac: float = _field(0.1, "a worker leaves its class only when it is this much outside of it, 0 to 1")

    def __post_init__(self) -> None:
        _need(self.hold_steps >= 1, "grouping.hold_steps", self.hold_steps, "at least 1", "raise it")
        _need(0 <= self.margin_frac < 1, "grouping.margin_frac", self.margin_frac, "0 to below 1", "try 0.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """Which server holds which shard, and when shards move."""

    move: bool = _field(True, "shards leave a server that holds the others up; off: they stay where they are")
    interval_steps: int = _field(50, "steps between two looks at the servers' load, at least 1")
    min_gain_frac: float = _field(0.05, "a move must shorten the servers' part of a step by this much, 0 to 1")
    horizon_steps: int = _field(500, "steps over which a move must earn what it costs, at least 1")
    hold_intervals: int = _field(3, "looks during which a shard that moved stays where it is, 0 or more")
    spare_frac: float = _field(
        1.0, "room on each server for shards of others, as part of an even share; 0: shards cannot move"
    )
    servers: tuple[int, ...] = _field(
        (), "numbers of the servers that hold shards until job.use_servers says otherwise; empty: all"
    )

    def __post_init__(self) -> None:
        _need(self.interval_steps >= 1, "routing.interval_steps", self.interval_steps, "at least 1", "raise it")
        _need(0 <= self.min_gain_frac < 1, "routing.min_gain_frac", self.min_gain_frac, "0 to below 1", "try 0.05")
        _need(self.horizon_steps >= 1, "routing.horizon_steps", self.horizon_steps, "at least 1", "raise it")
        _need(self.hold_intervals >= 0, "routing.hold_intervals", self.hold_intervals, "0 or more", "raise it")
        _need(self.spare_frac >= 0, "routing.spare_frac", self.spare_frac, "0 or more", "try 1")
        distinct = len(set(self.servers)) == len(self.servers) and all(server >= 0 for server in self.servers)
        _need(distinct, "routing.servers", self.servers, "distinct numbers of 0 or more", "write 0:1")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """When a run with several groups slides towards sync, and back."""

    enabled: bool = _field(True, "slide towards sync while loss or gradients drift apart, in hybrid and async mode")
    loss_name: str = _field("loss", "name under which the script logs its loss with job.log")
    loss_rise_frac: float = _field(0.1, "smoothed loss above its best by this much is a drift, above 0")
    min_agreement: float = _field(
        -0.2, "mean cosine of the groups' gradients below this is a drift, -1 to 1; -1: never"
    )
    hold_steps: int = _field(50, "steps at a level before the next change, at least 1")

    def __post_init__(self) -> None:
        _need(bool(self.loss_name), "guard.loss_name", self.loss_name, "a name", "write loss")
        _need(self.loss_rise_frac > 0, "guard.loss_rise_frac", self.loss_rise_frac, "above 0", "try 0.1")
        _need(-1 <= self.min_agreement <= 1, "guard.min_agreement", self.min_agreement, "-1 to 1", "try -0.2")
        _need(self.hold_steps >= 1, "guard.hold_steps", self.hold_steps, "at least 1", "raise it")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowConfig:
    """When a server closes an aggregation window."""

    quorum_frac: float = _field(0.5, "fraction of live groups needed at the deadline, above 0 to 1")
    deadline: str = _field("mad", "mad: median + k MAD of arrival offsets; fixed: window.fixed_s")
    fixed_s: float = _field(0.1, "seconds from the first push to a fixed deadline, above 0")
    mad_k: float = _field(3.0, "k of the mad deadline, 0 or more")
    min_history: int = _field(8, "arrival offsets needed before a mad deadline is used, at least 1")

    def __post_init__(self) -> None:
        _need(0 < self.quorum_frac <= 1, "window.quorum_frac", self.quorum_frac, "above 0 to 1", "try 0.5")
        _need(self.deadline in ("mad", "fixed"), "window.deadline", self.deadline, "mad or fixed", "choose one")
        _need(self.fixed_s > 0, "window.fixed_s", self.fixed_s, "above 0", "try 0.1")
        _need(self.mad_k >= 0, "window.mad_k", self.mad_k, "0 or more", "try 3")
        _need(self.min_history >= 1, "window.min_history", self.min_history, "at least 1", "raise it")


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessConfig:
    """How much a late gradient counts, and how late it may be."""

    decay: str = _field("inverse", "none, inverse: 1/(1+t), exponential: exp(-rate t), t in versions")
    rate: float = _field(0.2, "rate of the exponential decay, above 0")
    cap: int = _field(0, "largest staleness in versions that still counts; 0: no cap")
    over_cap: str = _field("drop", "drop: refuse a push over the cap; clamp: count it as the cap")
    bound: int = _field(2, "own steps that a worker may be ahead of the servers (async, hybrid), 0 or more")
    ssp: int = _field(0, "steps that a group may be ahead of the slowest one (async, hybrid); 0: no bound")

    def __post_init__(self) -> None:
        kinds = ("none", "inverse", "exponential")
        _need(self.decay in kinds, "staleness.decay", self.decay, " or ".join(kinds), "choose one")
        _need(self.rate > 0, "staleness.rate", self.rate, "above 0", "try 0.2")
        _need(self.cap >= 0, "staleness.cap", self.cap, "0 or more", "raise it")
        _need(self.over_cap in ("drop", "clamp"), "staleness.over_cap", self.over_cap, "drop or clamp", "choose one")
        _need(self.bound >= 0, "staleness.bound", self.bound, "0 or more", "raise it")
        _need(self.ssp >= 0, "staleness.ssp", self.ssp, "0 or more", "raise it")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommConfig:
    """The data path."""

    mode: str = _field("auto", "rma: one-sided, p2p: two-sided, auto: rma if its self-test passes")
    num_slots: int = _field(2, "push slots of each worker on each server, at least 2")
    shard_bytes: int = _field(4 * MiB, "largest shard in bytes, at least 1024")
    publish_buffers: int = _field(3, "published copies of each shard, at least 2")
    poll_max_s: float = _field(0.001, "longest sleep of the communication thread, 20 us to 2 ms")
    deadline_s: float = _field(1800.0, "seconds that one wait for another rank may last, above 0")
    checksum: bool = _field(False, "push payloads carry a checksum that servers verify")

    def __post_init__(self) -> None:
        _need(self.mode in ("auto", "rma", "p2p"), "comm.mode", self.mode, "auto, rma or p2p", "choose one")
        _need(self.num_slots >= 2, "comm.num_slots", self.num_slots, "at least 2", "raise it")
        _need(self.shard_bytes >= 1024, "comm.shard_bytes", self.shard_bytes, "at least 1024", "raise it")
        _need(self.publish_buffers >= 2, "comm.publish_buffers", self.publish_buffers, "at least 2", "raise it")
        _need(20e-6 <= self.poll_max_s <= 2e-3, "comm.poll_max_s", self.poll_max_s, "20 us to 2 ms", "try 0.001")
        _need(self.deadline_s > 0, "comm.deadline_s", self.deadline_s, "above 0", "try 1800")


def _codec_text(setting: str, text: str, *, auto: bool) -> str:
    """A codec in its one spelling; ``auto`` where it is legal."""
    word = text.strip().lower()
    if word == "auto" and auto:
        return word
    try:
        return str(CodecSpec.parse(word))
    except ConfigError as error:
        names = [codec.name.lower() for codec in Codec] + ["auto"] * auto
        name, _, part = word.partition(":")
        near = [] if name in names else difflib.get_close_matches(name, names, n=1)
        if not near:
            raise ConfigError(f"cannot accept {setting}: {error}") from None
        fixed = f"{near[0]}:{part}" if near[0] == "topk" and part else near[0]
        raise ConfigError(
            f"cannot accept {setting}: got codec {text.strip()!r}, nearest is {near[0]!r}; write {fixed}"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionConfig:
    """How gradients are encoded on their way to the servers."""

    rules: tuple[str, ...] = _field(
        (),
        "PATTERN=CODEC by parameter name, the first that fits wins: none, fp32, fp16, bf16, int8, onebit, topk:0.01"
        " or auto; a parameter that none fits is sent as it is",
    )
    error_feedback: bool = _field(True, "what a lossy codec leaves out of one step is added to the next")
    auto_codecs: tuple[str, ...] = _field(
        ("none", "fp16", "int8", "topk:0.01"), "codecs that auto chooses among, in order of preference; none is needed"
    )
    max_error: float = _field(
        0.0, "without error feedback, largest relative L2 error of a codec that auto takes, 0 or more; 0: no bound"
    )
    min_gain_frac: float = _field(0.1, "auto leaves none only to save more than this part of an exchange, 0 to 1")
    switch_gain_frac: float = _field(
        0.05, "auto leaves one codec for another only to save more than this part of an exchange, 0 to 1"
    )
    hold_steps: int = _field(20, "steps between two switches of auto, at least 1; it goes back to none at any time")

    def __post_init__(self) -> None:
        self.parsed_rules()
        setting = "compression.auto_codecs"
        codecs = [_codec_text(setting, text, auto=False) for text in self.auto_codecs]
        _need("none" in codecs, setting, self.auto_codecs, "none among them", "add none")
        _need(len(set(codecs)) == len(codecs), setting, self.auto_codecs, "each codec once", "leave one out")
        bounded = self.error_feedback or self.max_error > 0
        chooses = any(codec == "auto" for _, codec in self.parsed_rules())
        _need(
            bounded or not chooses,
            "compression.max_error",
            self.max_error,
            "above 0 for auto without error feedback, or a codec might lose most of each gradient",
            "try 0.01, or leave compression.error_feedback on",
        )
        for name in ("min_gain_frac", "switch_gain_frac"):
            value = getattr(self, name)
            _need(0 <= value < 1, f"compression.{name}", value, "0 to below 1", "try 0.05")
        _need(self.max_error >= 0, "compression.max_error", self.max_error, "0 or more", "try 0.01")
        _need(self.hold_steps >= 1, "compression.hold_steps", self.hold_steps, "at least 1", "raise it")

    def parsed_rules(self) -> tuple[tuple[str, str], ...]:
        """Pattern and codec of each rule; the codec in its one spelling, or ``auto``."""
        setting = "compression.rules"
        pairs = []
        for rule in self.rules:
            pattern, equals, codec = rule.rpartition("=")
            _need(bool(equals and pattern.strip()), setting, rule, "PATTERN=CODEC", "write for example *=fp16")
            pairs.append((pattern.strip(), _codec_text(setting, codec, auto=True)))
        return tuple(pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """How samples are handed out."""

    prefetch_steps: int = _field(2, "batches that a worker asks for ahead of use, at least 1")
    buffers: str = _field("mean", "model buffers at the end: mean over samples, first worker's, none")

    def __post_init__(self) -> None:
        _need(self.prefetch_steps >= 1, "data.prefetch_steps", self.prefetch_steps, "at least 1", "raise it")
        _need(self.buffers in ("mean", "first", "none"), "data.buffers", self.buffers, "mean, first or none", "choose")


_CHANGE = re.compile(r"(\d+):(s?)(\d+)=(\d*\.?\d+(?:[eE][+-]?\d+)?)", re.ASCII)
"""One entry of ``emulate.script``: step, s for a server, number, speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedChange:
    """From a step on an emulated device has another speed.

    Args:
        step: the worker's own step, from 1; of a server the version of a shard.
        is_server: a server, else a worker.
        index: its number among the servers or the workers.
        speed: relative speed of a worker; gradient bytes that a server takes in a second, 0: the real rate.
    """

    step: int
    is_server: bool
    index: int
    speed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulateConfig:
    """Emulated device speeds, for trying hpcps on one machine."""

    speeds: tuple[float, ...] = _field((), "relative speed of each worker, in rank order; empty: real speed")
    sample_s: float = _field(0.001, "seconds that one sample takes on a device of speed 1, above 0")
    link_bytes_per_s: float = _field(0.0, "rate of each worker's pushes and of its pulls; 0: the real one")
    server_bytes_per_s: tuple[float, ...] = _field(
        (), "gradient bytes that each server takes in a second, in rank order, 0: the real rate; empty: the real rates"
    )
    script: tuple[str, ...] = _field(
        (),
        "changes of speed while it runs, STEP:WORKER=SPEED or STEP:sSERVER=BYTES_PER_S, workers and servers numbered"
        " from 0: for example 300:0=1,600:0=3,400:s1=25e6",
    )
    trace: str = _field(
        "",
        "file of lines 'STEP SECONDS SECONDS ...': seconds a sample takes on each worker from that step on, in place of"
        " speeds and sample_s; empty: none",
    )

    def __post_init__(self) -> None:
        _need(all(v > 0 for v in self.speeds), "emulate.speeds", self.speeds, "positive speeds", "write 3:2:1:1")
        _need(self.sample_s > 0, "emulate.sample_s", self.sample_s, "above 0", "try 0.001")
        _need(self.link_bytes_per_s >= 0, "emulate.link_bytes_per_s", self.link_bytes_per_s, "0 or more", "try 125e6")
        rates = self.server_bytes_per_s
        _need(all(rate >= 0 for rate in rates), "emulate.server_bytes_per_s", rates, "0 or more each", "write 1e8:25e6")
        changes = self.parsed_script()
        devices = [(change.step, change.is_server, change.index) for change in changes]
        twice = len(set(devices)) < len(devices)
        _need(not twice, "emulate.script", self.script, "one change of a device at a step", "leave one out")
        paced = bool(self.speeds) or any(not change.is_server for change in changes)
        remedy = "leave out emulate.speeds and the workers' part of emulate.script, or the trace"
        _need(not (self.trace and paced), "emulate.trace", self.trace, "no other statement of workers' speeds", remedy)

    def parsed_script(self) -> tuple[SpeedChange, ...]:
        """The changes of speed, in order of time."""
        changes = []
        for text in self.script:
            match = _CHANGE.fullmatch(text.strip())
            step, server, index, speed = match.groups() if match else ("0", "", "0", "nan")
            change = SpeedChange(step=int(step), is_server=bool(server), index=int(index), speed=float(speed))
            fits = 0 < change.speed < float("inf") or (change.is_server and change.speed == 0)
            need = "STEP:WORKER=SPEED, above 0, or STEP:sSERVER=BYTES_PER_S"
            _need(fits, "emulate.script", text, need, "write for example 300:0=1 or 400:s1=25e6")
            changes.append(change)
        return tuple(sorted(changes, key=lambda change: change.step))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What a run writes down."""

    dir: str = _field("", "folder of per-rank logs and events; empty: none for one process, else hpcps-run")
    level: str = _field("info", "console level of rank 0: debug, info, warning, error")
    progress_s: float = _field(2.0, "seconds between two progress lines, above 0")

    def __post_init__(self) -> None:
        levels = ("debug", "info", "warning", "error")
        _need(self.level in levels, "log.level", self.level, " or ".join(levels), "choose one")
        _need(self.progress_s > 0, "log.progress_s", self.progress_s, "above 0", "try 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that describes a run."""

    server_num: int = _field(1, "ranks that serve, at least 1; a world of one rank serves and works")
    worker_num: int = _field(0, "ranks that train; 0: all that do not serve")
    heterogeneous: bool = _field(False, "shares follow measured speed; off: equal shares")
    sync_mode: str = _field("sync", "sync: one group, async: every worker its own, hybrid: groups of like speed")
    sync_group_size: int = _field(0, "workers in a group of hybrid mode; 0: found from the speeds")
    overlap: int = _field(0, "1: the next forward runs while push and pull are under way")
    seed: int = _field(0, "seed of the sample order, 0 or more")
    worker_endpoints: tuple[str, ...] = _field((), "hosts of the workers, host or host:port")
    server_endpoints: tuple[str, ...] = _field((), "hosts of the servers, host or host:port")
    capacity: CapacityConfig = _field(CapacityConfig(), "speed measurement")
    partition: PartitionConfig = _field(PartitionConfig(), "bounds of shares")
    grouping: GroupingConfig = _field(GroupingConfig(), "changes of groups")
    routing: RoutingConfig = _field(RoutingConfig(), "places and moves of shards")
    guard: GuardConfig = _field(GuardConfig(), "guard rail of asynchronous runs")
    window: WindowConfig = _field(WindowConfig(), "aggregation window")
    staleness: StalenessConfig = _field(StalenessConfig(), "late gradients")
    comm: CommConfig = _field(CommConfig(), "data path")
    compression: CompressionConfig = _field(CompressionConfig(), "encoding of gradients")
    data: DataConfig = _field(DataConfig(), "samples and buffers")
    emulate: EmulateConfig = _field(EmulateConfig(), "emulated speeds")
    log: LogConfig = _field(LogConfig(), "logs")

    def __post_init__(self) -> None:
        _need(self.server_num >= 1, "server_num", self.server_num, "at least 1", "pass --server-num 1")
        _need(self.worker_num >= 0, "worker_num", self.worker_num, "0 or more", "pass --worker-num")
        modes = ("sync", "async", "hybrid")
        _need(self.sync_mode in modes, "sync_mode", self.sync_mode, " or ".join(modes), "choose one")
        _need(self.sync_group_size >= 0, "sync_group_size", self.sync_group_size, "0 or more", "raise it")
        _need(self.overlap in (0, 1), "overlap", self.overlap, "0 or 1", "choose one")
        _need(self.seed >= 0, "seed", self.seed, "0 or more", "raise it")

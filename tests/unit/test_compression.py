"""Compression in whole jobs: nothing is lost, what is reported was sent, rules and choices act where they should."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks import Outcome, run_ranks

import hpcps
import hpcps.torch as ht
from hpcps.comm.channel import Bytes, Slot
from hpcps.comm.link import LinkUse
from hpcps.comm.loopback import Faults, LoopbackChannel
from hpcps.config import CommConfig, CompressionConfig, EmulateConfig, RunConfig, StalenessConfig, WindowConfig
from hpcps.errors import ConfigError
from hpcps.plan import Codec, CodecSpec
from hpcps.protocol.messages import HEADER_BYTES, PushHeader
from hpcps.runtime.client import WorkerClient
from hpcps.runtime.compression import Compression
from hpcps.runtime.job import Job
from hpcps.runtime.server_loop import ServerLoop

NUM_FEATURES, WIDTH, BATCH, RATE = 6, 200, 8, 0.5
CODECS = ("fp16", "bf16", "int8", "onebit", "topk:0.05")


def constant_gradients(seed: int, num_samples: int) -> torch.Tensor:
    """The gradient of ``sum of x`` is x, wherever the parameters stand."""
    return torch.randn(num_samples, NUM_FEATURES, generator=torch.Generator().manual_seed(seed))


def train(job: Job, x: torch.Tensor, *, epochs: int, pins: tuple[str, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Parameters at the end, and what this worker's group still owes of them; ``pins``: codec of each epoch."""
    model = torch.nn.Linear(NUM_FEATURES, WIDTH, bias=False)
    torch.nn.init.zeros_(model.weight)
    factors = torch.linspace(0.01, 3.0, WIDTH)
    optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model, job)
    loader = ht.DistributedLoader(torch.utils.data.TensorDataset(x), BATCH, job)
    for epoch in job.epochs(epochs):
        if pins:
            job.client.compression.pin(CodecSpec.parse(pins[epoch]))
        for (inputs,) in loader:
            optimizer.zero_grad()
            (model(inputs) * factors).sum(1).mean().backward()
            optimizer.step()
    owed = [job.client.compression.take_owed(shard) for shard in job.client.route.shards]
    return model.weight.detach().numpy().reshape(-1).copy(), np.concatenate(owed)


def expected(x: torch.Tensor, epochs: int) -> np.ndarray:
    """Parameters at the end if all is sent."""
    gradient = torch.linspace(0.01, 3.0, WIDTH).double()[:, None] * x.double().sum(0)[None, :]
    return (-RATE * epochs / BATCH * gradient).reshape(-1).numpy()


def check_all_arrived(outcome: Outcome, x: torch.Tensor, epochs: int) -> None:
    owed = sum(owed.astype(np.float64) for _, owed in outcome.results)
    want = expected(x, epochs)
    for values, _ in outcome.results:
        assert np.abs(values - RATE * owed - want).max() < 2e-4 * np.abs(want).max()
    assert np.abs(owed).max() > 0


@pytest.mark.parametrize("mode", ["sync", "async", "hybrid"])
@pytest.mark.parametrize("codec", CODECS)
def test_what_was_not_sent_is_owed_in_every_mode(mode: str, codec: str) -> None:
    x, epochs = constant_gradients(3, 96), 5
    outcome = run_ranks(
        lambda job: train(job, x, epochs=epochs),
        num_workers=4,
        num_servers=2,
        config=RunConfig(
            sync_mode=mode,
            sync_group_size=2,
            window=WindowConfig(quorum_frac=0.5, deadline="fixed", fixed_s=0.001),
            staleness=StalenessConfig(decay="none"),
            comm=CommConfig(shard_bytes=1024, checksum=True),
            compression=CompressionConfig(rules=(f"*={codec}",)),
        ),
        faults=Faults(seed=1, delay_s=0.001, drop_frac=0.1, repeat_frac=0.2),
    )
    assert {job.client.grouping.generation > 0 for job in outcome.jobs} == {mode != "sync"}
    check_all_arrived(outcome, x, epochs)


@pytest.mark.parametrize("codec", ["int8", "onebit", "topk:0.05"])
def test_what_a_group_owed_every_group_after_it_owes(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds are measured in one group, which owes something by the time that it is split in two."""
    before: list[dict[int, np.ndarray]] = []
    after: list[dict[int, np.ndarray]] = []
    pool = WorkerClient._pool_owed

    def residuals(client: WorkerClient) -> dict[int, np.ndarray]:
        found = {key: state.encoder.feedback._residual for key, state in client.compression._states.items()}
        return {key: residual.copy() for key, residual in found.items() if residual is not None}

    def note(self: WorkerClient) -> None:
        before.append(residuals(self))
        pool(self)
        after.append(residuals(self))

    monkeypatch.setattr(WorkerClient, "_pool_owed", note)
    x = constant_gradients(3, 96)
    config = RunConfig(
        sync_mode="hybrid",
        heterogeneous=True,
        sync_group_size=2,
        emulate=EmulateConfig(speeds=(2.0, 2.0, 1.0, 1.0), sample_s=0.0005),
        comm=CommConfig(shard_bytes=1024),
        compression=CompressionConfig(rules=(f"*={codec}",)),
    )
    outcome = run_ranks(lambda job: train(job, x, epochs=3), num_workers=4, num_servers=2, config=config)
    shards = outcome.jobs[0].client.route.shards
    assert [job.client.grouping.generation for job in outcome.jobs] == [1] * 4
    for shard in shards:
        (owed,) = (each[shard.key] for each in before if shard.key in each)  # the one group has one owner a shard
        assert owed.any(), "there was nothing to carry over"
        now = [each[shard.key] for each in after if shard.key in each]
        assert len(now) == 2
        assert all(np.array_equal(each, owed) for each in now)


def test_switches_at_run_time_carry_over_what_is_owed() -> None:
    pins = ("topk:0.01", "int8", "onebit", "fp16", "topk:0.05", "none", "bf16")
    x = constant_gradients(4, 32)
    outcome = run_ranks(
        lambda job: train(job, x, epochs=len(pins), pins=pins),
        num_workers=2,
        config=RunConfig(comm=CommConfig(shard_bytes=1024), compression=CompressionConfig(rules=("*=auto",))),
    )
    check_all_arrived(outcome, x, len(pins))


def test_a_switch_to_none_pays_everything() -> None:
    x = constant_gradients(5, 32)
    outcome = run_ranks(
        lambda job: train(job, x, epochs=3, pins=("topk:0.01", "onebit", "none")),
        num_workers=2,
        config=RunConfig(compression=CompressionConfig(rules=("*=auto",))),
    )
    assert all(not owed.any() for _, owed in outcome.results)
    for values, _ in outcome.results:
        np.testing.assert_allclose(values, expected(x, 3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("zeros", [False, True])
def test_packed_gives_the_bits_of_none(zeros: bool) -> None:
    x = constant_gradients(6, 32)
    x[:, 1:] *= not zeros
    results = []
    for rules in (("*=packed",), ()):
        config = RunConfig(comm=CommConfig(shard_bytes=1024), compression=CompressionConfig(rules=rules))
        results.append(run_ranks(lambda job: train(job, x, epochs=2), num_workers=2, num_servers=2, config=config))
    packed, plain = results
    for (values, owed), (expected_values, _) in zip(packed.results, plain.results, strict=True):
        assert values.tobytes() == expected_values.tobytes()
        assert not owed.any()
    sent, whole = (sum(stats.payload_bytes for stats in outcome.stats) for outcome in results)
    assert sent < 0.3 * whole if zeros else sent == whole


def test_without_feedback_nothing_is_owed_and_something_is_lost() -> None:
    x = constant_gradients(6, 32)
    config = CompressionConfig(rules=("*=topk:0.01",), error_feedback=False)
    outcome = run_ranks(lambda job: train(job, x, epochs=2), num_workers=2, config=RunConfig(compression=config))
    want = expected(x, 2)
    for values, owed in outcome.results:
        assert not owed.any()
        assert np.linalg.norm(values - want) > 0.5 * np.linalg.norm(want)


# --- rules and volume ------------------------------------------------------------------------------------------------


class Mixed(torch.nn.Module):
    """An embedding and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(300, 8)
        self.dense = torch.nn.Linear(8, 40)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.dense(self.embedding(ids))
        return found


def train_mixed(job: Job) -> None:
    torch.manual_seed(0)
    model = Mixed()
    optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, job)
    data = torch.utils.data.TensorDataset(torch.arange(64) % 300)
    for _ in job.epochs(2):
        for (ids,) in ht.DistributedLoader(data, 8, job):
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PushHeader, int]]:
    """Header and bytes of every frame that servers take."""
    found: list[tuple[PushHeader, int]] = []
    take = ServerLoop._on_frame

    def note(self: ServerLoop, head: bytes, payload: Bytes, slot: Slot | None) -> None:
        found.append((PushHeader.unpack(head[:HEADER_BYTES]), len(head) + payload.size))
        take(self, head, payload, slot)

    monkeypatch.setattr(ServerLoop, "_on_frame", note)
    return found


def test_each_parameter_is_encoded_as_its_rule_says(arrivals: list[tuple[PushHeader, int]]) -> None:
    config = RunConfig(
        comm=CommConfig(shard_bytes=4096),
        compression=CompressionConfig(rules=("embedding.*=fp16", "dense.weight=int8")),
    )
    outcome = run_ranks(train_mixed, num_workers=2, num_servers=2, config=config)
    shards = outcome.jobs[0].client.route.shards
    assert [(shard.codec, shard.numel) for shard in shards] == [
        ("fp16", 800), ("fp16", 800), ("fp16", 800), ("int8", 320), ("none", 40),
    ]  # fmt: skip
    pushed = {(header.key, header.codec, header.payload_bytes) for header, _ in arrivals if header.clock > 0}
    assert pushed == {
        (0, Codec.FP16, 1600), (1, Codec.FP16, 1600), (2, Codec.FP16, 1600),
        (3, Codec.INT8, 320 + 2), (4, Codec.NONE, 160),
    }  # fmt: skip


def test_the_reported_volume_is_what_the_servers_got(arrivals: list[tuple[PushHeader, int]]) -> None:
    rules = CompressionConfig(rules=("embedding.*=topk:0.1", "*=fp16"))
    outcome = run_ranks(train_mixed, num_workers=2, num_servers=2, config=RunConfig(compression=rules))
    for job, events in zip(outcome.jobs, outcome.worker_events, strict=True):
        steps = [fields for name, fields in events if name == "step"]
        mine = [(header, size) for header, size in arrivals if header.sender == job.rank]
        assert sum(step["push_bytes"] for step in steps) == sum(size for _, size in mine)
        values = [header.numel * 4 for header, _ in mine if header.clock > 0]
        assert sum(step["raw_bytes"] for step in steps) == sum(values)
        per_step = [sum(size for header, size in mine if header.clock == clock) for clock in range(2, 1 + len(steps))]
        assert [step["push_bytes"] for step in steps[1:]] == per_step, "a sync step waits for its own pushes"
    assert sum(size for _, size in arrivals) < sum(header.numel * 4 for header, _ in arrivals)
    gradients = [header for header, _ in arrivals if header.clock > 0]
    assert sum(stats.payload_bytes for stats in outcome.stats) == sum(header.payload_bytes for header in gradients)
    assert sum(stats.raw_bytes for stats in outcome.stats) == 4 * sum(header.numel for header in gradients)


def test_a_rule_that_fits_nothing_is_an_error_before_training() -> None:
    config = RunConfig(compression=CompressionConfig(rules=("embeding.*=fp16",)))
    with pytest.raises(ConfigError, match=r"pattern fits none of 3 trainable parameters; .*'embedding\.weight'"):
        run_ranks(train_mixed, num_workers=1, config=config)


def test_one_process_has_no_link_and_sends_all_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    results = []
    for rules in ((), ("*=topk:0.01",)):
        with hpcps.init(compression=CompressionConfig(rules=rules)) as job:
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 4)
            optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, job)
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            results.append(model.weight.detach().clone())
    assert torch.equal(*results)


# --- what is not finite ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_finite_is_reported_reaches_the_servers_and_is_never_owed(codec: str) -> None:
    x = constant_gradients(7, 16)
    x[5, 2] = float("nan")
    config = RunConfig(comm=CommConfig(shard_bytes=1024), compression=CompressionConfig(rules=(f"*={codec}",)))
    outcome = run_ranks(lambda job: train(job, x, epochs=2), num_workers=2, config=config)
    for values, owed in outcome.results:
        there = np.isnan(values.reshape(WIDTH, NUM_FEATURES)[:, 2])
        assert there.any() if codec.startswith("topk") else there.all(), "top-k sends as many as it may"
        assert np.isfinite(owed).all()
    notes = outcome.of_event("not_finite")
    assert notes
    assert all(note["num_elems"] > 0 for note in notes)


# --- auto ------------------------------------------------------------------------------------------------------------


def with_link(monkeypatch: pytest.MonkeyPatch, bytes_per_s: float) -> None:
    """Let the channel report that its frames took what a link of this rate takes, and exchanges as long as them."""
    real = LoopbackChannel.link_use

    def link_use(self: LoopbackChannel, server: int) -> LinkUse:
        use = real(self, server)
        return use._replace(busy_s=20e-6 * use.num_frames + use.num_bytes / bytes_per_s)

    monkeypatch.setattr(LoopbackChannel, "link_use", link_use)
    real_end, seen = Compression.end_step, {}

    def end_step(self: Compression, *, exchange_s: float, hidden_s: float) -> None:
        busy_s = self._channel.link_use(0).busy_s
        before_s, seen[id(self)] = seen.get(id(self), 0.0), busy_s
        real_end(self, exchange_s=busy_s - before_s, hidden_s=hidden_s)

    monkeypatch.setattr(Compression, "end_step", end_step)


@pytest.mark.parametrize(("bytes_per_s", "expected_codecs"), [(1e6, {"topk:0.01"}), (1e13, {"none"})])
def test_auto_follows_the_link(
    bytes_per_s: float, expected_codecs: set[str], monkeypatch: pytest.MonkeyPatch, arrivals: list
) -> None:
    with_link(monkeypatch, bytes_per_s)
    x = constant_gradients(8, 800)

    def worker(job: Job) -> tuple[np.ndarray, np.ndarray]:
        return train(job, x, epochs=1)

    config = RunConfig(compression=CompressionConfig(rules=("*=auto",), min_gain_frac=0.5))
    outcome = run_ranks(worker, num_workers=1, config=config)
    last = {str(CodecSpec(codec=header.codec, keep_frac=0.01 if header.codec is Codec.TOPK else 0.0))
            for header, _ in arrivals if header.clock > 90}  # fmt: skip
    assert last == expected_codecs
    switches = outcome.of_event("codec")
    assert bool(switches) == (expected_codecs != {"none"})
    for switch in switches:
        assert switch["codec"] in switch["reason"]
        assert set(switch["predicted_s"]) == {"none", "fp16", "int8", "topk:0.01"}
        assert switch["link_bytes_per_s"] == pytest.approx(bytes_per_s, rel=0.3)


def test_a_link_that_becomes_quick_is_noticed(monkeypatch: pytest.MonkeyPatch, arrivals: list) -> None:
    """With small frames on it nothing would tell; so a step with none is sent now and then, at growing intervals."""
    x = constant_gradients(9, 800)

    def worker(job: Job) -> None:
        train_with_turn(job, x, monkeypatch)

    with_link(monkeypatch, 1e6)
    config = CompressionConfig(rules=("*=auto",), hold_steps=10, min_gain_frac=0.5)
    outcome = run_ranks(worker, num_workers=1, config=RunConfig(compression=config))
    codecs = [switch["codec"] for switch in outcome.of_event("codec")]
    assert codecs[0] == "topk:0.01"
    assert codecs[-1] == "none"


def train_with_turn(job: Job, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains twice over the data and makes the link quick in between."""
    model = torch.nn.Linear(NUM_FEATURES, WIDTH, bias=False)
    optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model, job)
    real = job.client.channel.link_use
    turn = [0.0, 0, 0]

    def quick(server: int) -> LinkUse:
        use = real(server)
        if not turn[1]:
            turn[:] = [use.busy_s, use.num_bytes, use.num_frames]
        return use._replace(busy_s=turn[0] + 20e-6 * (use.num_frames - turn[2]) + (use.num_bytes - turn[1]) / 1e13)

    for epoch in job.epochs(8):
        if epoch == 1:
            monkeypatch.setattr(job.client.channel, "link_use", quick)
        for (inputs,) in ht.DistributedLoader(torch.utils.data.TensorDataset(x), BATCH, job):
            optimizer.zero_grad()
            model(inputs).sum(1).mean().backward()
            optimizer.step()


def test_weights_of_zero_leave_what_is_owed_alone() -> None:
    x = constant_gradients(10, 16)

    def worker(job: Job) -> list[np.ndarray]:
        model = torch.nn.Linear(NUM_FEATURES, WIDTH, bias=False)
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE), model, job)
        shards = job.client.route.shards
        owed = []
        for index, (inputs,) in enumerate(ht.DistributedLoader(torch.utils.data.TensorDataset(x), 4, job)):
            optimizer.zero_grad()
            optimizer.set_batch_weight(1.0 if index == 0 else 0.0)
            model(inputs).sum(1).mean().backward()
            optimizer.step()
            assert job.client.compression.volume()["push_bytes"] < (9000 if index == 0 else 500)
            owed.append(job.client.compression.take_owed(shards[0]))
            job.client.compression.owe(shards[0], owed[-1].copy())
        return owed

    config = RunConfig(compression=CompressionConfig(rules=("*=topk:0.01",)))
    (owed,) = run_ranks(worker, num_workers=1, config=config).results
    assert owed[0].any()
    assert all(np.array_equal(each, owed[0]) for each in owed[1:])

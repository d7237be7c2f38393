"""What a worker tells of itself: waits for a processor, its link, its memory."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from ranks import run_ranks

import hpcps.torch as ht
from hpcps.comm.channel import Channel
from hpcps.comm.link import LinkUse
from hpcps.config import EmulateConfig, RunConfig
from hpcps.runtime.disturbance import Disturbance
from hpcps.runtime.job import Job
from hpcps.runtime.observe import Observer
from hpcps.torch.devices import memory_meter
from hpcps.units import GiB, MiB

NO_GROUP = "0::/\n"


class Links:
    """A channel that only knows how long its links were busy, and what they carried."""

    def __init__(self, *busy_s: float) -> None:
        self.busy_s = list(busy_s)
        self.pulls = [LinkUse() for _ in busy_s]
        self.num_frames = self.num_bytes = 0

    def link_use(self, server: int) -> LinkUse:
        return LinkUse(self.num_frames, self.num_bytes, self.busy_s[server])

    def pull_use(self, server: int) -> LinkUse:
        return self.pulls[server]


class Waits:
    """A processor that others use."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.closed = False

    def waited_s(self) -> float:
        return self.seconds

    def close(self) -> None:
        self.closed = True


def observer(*busy_s: float) -> tuple[Observer, Links, Waits]:
    links, waits = Links(*busy_s), Waits()
    made = Observer(cast(Channel, links), num_servers=len(busy_s), disturbance=cast(Disturbance, waits))
    return made, links, waits


def system(folder: Path, *, schedstat: str | None, groups: str, stats: dict[str, str]) -> Disturbance:
    """A disturbance that reads files of a made-up system."""
    proc, cgroups = folder / "proc", folder / "cgroup"
    for path, text in {"thread-self/schedstat": schedstat, "self/cgroup": groups}.items():
        if text is not None:
            (proc / path).parent.mkdir(parents=True, exist_ok=True)
            (proc / path).write_text(text)
    for name, text in stats.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    return Disturbance(proc=proc, cgroups=cgroups)


# run delay file, control groups, their counters; seconds waited
SYSTEMS: list[tuple[str | None, str, dict[str, str], float]] = [
    ("72869 2500000000 2\n", "0::/job\n", {"job/cpu.stat": "usage_usec 5\nthrottled_usec 900000000\n"}, 2.5),
    (None, "0::/job\n", {"job/cpu.stat": "usage_usec 5\nthrottled_usec 1500000\n"}, 1.5),
    ("no numbers\n", "0::/job\n", {"job/cpu.stat": "throttled_usec 1500000\n"}, 1.5),
    ("", "4:cpu,cpuacct:/a\n1:x:/\n0::/b\n", {"cpu,cpuacct/a/cpu.stat": "throttled_time 250000000\n"}, 0.25),
    (None, "4:cpu:/a\n0::/b\n", {"cpu/a/cpu.stat": "throttled_time 250000000\n", "b/cpu.stat": "usage_usec 1\n"}, 0.25),
    (None, "4:cpuacct,cpu:/a\n", {"cpu/a/cpu.stat": "throttled_time 250000000\n"}, 0.25),
    (None, "0::/b\n", {"unified/b/cpu.stat": "throttled_usec 750000\n"}, 0.75),
    (None, "0::/b\n", {"b/cpu.stat": "no numbers at all\nthrottled_usec\n"}, 0.0),
    (None, "nothing\n", {}, 0.0),
    (None, NO_GROUP, {}, 0.0),
]


@pytest.mark.parametrize(("schedstat", "groups", "stats", "waited_s"), SYSTEMS)
def test_waits_are_read_from_what_the_kernel_has(
    tmp_path: Path, schedstat: str | None, groups: str, stats: dict[str, str], waited_s: float
) -> None:
    made = system(tmp_path, schedstat=schedstat, groups=groups, stats=stats)
    assert made.waited_s() == pytest.approx(waited_s)
    made.close()
    made.close()
    assert made.waited_s() == 0.0


def test_a_counter_is_read_again_each_time(tmp_path: Path) -> None:
    made = system(tmp_path, schedstat="1 1000000000 1\n", groups=NO_GROUP, stats={})
    assert made.waited_s() == 1.0
    (tmp_path / "proc/thread-self/schedstat").write_text("1 3000000000 1\n")
    assert made.waited_s() == 3.0
    (tmp_path / "proc/thread-self/schedstat").write_text("gone\n")
    assert made.waited_s() == 0.0
    made.close()


def test_without_a_process_file_system_nothing_is_waited(tmp_path: Path) -> None:
    assert Disturbance(proc=tmp_path, cgroups=tmp_path).waited_s() == 0.0


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel counts no run delay")
def test_two_threads_that_want_the_lock_or_a_processor_show_on_this_system() -> None:
    """Says that the file is read at all: a counter that never falls."""
    made = Disturbance()
    before_s = made.waited_s()
    stop = threading.Event()
    other = threading.Thread(target=lambda: stop.wait(0.02))
    other.start()
    began_s = time.monotonic()
    while time.monotonic() - began_s < 0.01:
        pass
    stop.set()
    other.join()
    assert made.waited_s() >= before_s >= 0.0
    made.close()


def test_waits_are_told_as_a_part_of_computing() -> None:
    made, _, waits = observer(0.0)
    for waited_s in (0.1, 0.5):
        made.begin_batch(8, alike=True)
        waits.seconds += waited_s
        made.end_compute(8, 1.0)
        waits.seconds += 7.0  # between batches it waits for others anyway
    assert made.take().cpu_wait_frac == pytest.approx(0.3)
    assert made.take().cpu_wait_frac == 0.0
    made.begin_batch(8, alike=True)
    waits.seconds += 2.0
    made.end_compute(8, 1.0)
    assert made.take().cpu_wait_frac == 1.0
    made.close()
    assert waits.closed


def test_a_link_is_told_for_each_batch_of_a_step() -> None:
    made, links, _ = observer(1.0, 2.0)
    made.end_step(1)
    links.busy_s = [1.5, 2.5]
    made.end_step(4)
    made.end_step(0)
    assert made.take().link_s == pytest.approx([3.0, 0.25, 0.0])
    assert made.take().link_s == []
    alone, _, _ = observer()
    alone.end_step(1)
    assert alone.take().link_s == [], "one process has no link"


def test_memory_is_measured_for_the_first_sizes_only() -> None:
    made, _, _ = observer()
    calls = []

    def meter() -> tuple[int, int] | None:
        calls.append(size)
        return (100 + 10 * size) * MiB, GiB

    made.watch_memory(meter)
    caps = []
    for size in (24, 40, 24, 32, 0, 36, 28):
        made.begin_batch(size, alike=True)
        made.end_compute(size, 0.1)
        caps.append(made.take().max_samples)
    assert calls == [24, 24, 40, 40, 32, 32, 36, 36], "reset before, read after; four sizes"
    assert caps == [0, *[82] * 6]


def test_memory_is_not_measured_where_it_says_nothing() -> None:
    made, _, _ = observer()
    answers: list[tuple[int, int] | None] = [None, (100 * MiB, GiB), None]
    made.begin_batch(8, alike=True)
    made.end_compute(8, 0.1)
    made.watch_memory(lambda: answers.pop(0))
    made.begin_batch(8, alike=True)
    made.end_compute(8, 0.1)
    assert len(answers) == 2, "not measured on this device"
    made.begin_batch(8, alike=False)
    made.end_compute(8, 0.1)
    assert len(answers) == 2, "samples need what they need"
    made.begin_batch(8, alike=True)
    made.end_compute(8, 0.1)
    assert made.take().max_samples == 0


def test_the_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_meter("cpu")() is None
    resets: list[Any] = []
    fake = SimpleNamespace(
        max_memory_allocated=lambda device: 300,
        mem_get_info=lambda device: (500, 2000),
        memory_reserved=lambda device: 400,
        reset_peak_memory_stats=resets.append,
    )
    monkeypatch.setattr("hpcps.torch.devices.torch.cuda", fake)
    assert memory_meter("cuda:1")() == (300, 900)
    assert [(device.type, device.index) for device in resets] == [("cuda", 1)]


def test_a_job_tells_what_it_sees_of_itself() -> None:
    """Memory of a made-up device caps the first worker, whose emulated speed asks for more; links are told too."""

    def worker(job: Job) -> list[int]:
        if job.is_first:
            job.watch_memory(lambda: ((100 + 10 * job.order.count if job.order else 0) * MiB, 200 * MiB))
        model = torch.nn.Linear(1, 1)
        optimizer = ht.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, job)
        counts = []
        for (values,) in ht.DistributedLoader(torch.utils.data.TensorDataset(torch.zeros(480, 1)), 16, job):
            optimizer.zero_grad()
            model(values).mean().backward()
            optimizer.step()
            counts.append(len(values))
        return counts

    config = RunConfig(heterogeneous=True, emulate=EmulateConfig(speeds=(3.0, 1.0), sample_s=0.0005))
    outcome = run_ranks(worker, num_workers=2, config=config)
    assert max(outcome.results[0]) == 10, "12 would be even; 10 ran in the warm-up, though memory says 8"
    capacity = outcome.of_event("capacity")[-1]
    assert capacity["caps"] == [10, 0]
    assert max(capacity["link_s"]) > 0, "one of the two owns the only shard, and pushes it"
    assert all(error_frac > 0 for error_frac in capacity["error_frac"])


def test_links_are_told_by_server_and_direction() -> None:
    made, links, _ = observer(0.0, 0.0)
    told = []
    for step in range(1, 21):
        size = 4_000_000 if step <= 10 else 1_000_000
        links.num_frames += 2
        links.num_bytes += 2 * size
        links.busy_s[0] += 2 * (0.001 + size / 1e9)
        links.busy_s[1] += 2 * (0.002 + size / 1e8)
        links.pulls[1] = LinkUse(step, step * 500_000, step * 0.01)
        made.end_step(1)
        told.append(made.take().links)
    assert [bool(numbers) for numbers in told] == [step in (10, 20) for step in range(1, 21)]
    assert told[-1] == pytest.approx([0.001, 1e9, 0.0, 0.0, 0.002, 1e8, 0.0, 5e7])

"""Memory that may still be used, read from made-up /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcps.runtime.memory import free_memory
from hpcps.units import KiB


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       64000 kB\nMemFree:  10 kB\nMemAvailable:   1000 kB\n"
V1 = "sys/fs/cgroup/memory"
V2 = "sys/fs/cgroup"
HUGE = "9223372036854771712\n"

# files, bytes
CASES = [
    ({}, 0),
    ({"proc/meminfo": "MemTotal: 5 kB\nMemAvailable: lots\n"}, 0),
    ({"proc/meminfo": MEMINFO}, 1000 * KiB),
    ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "garbage\n4:cpu:/\n"}, 1000 * KiB),
    # version 2: a limit further up, where pages of files count as used but may be dropped
    (
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/job/step\n",
            f"{V2}/job/memory.max": "500000\n",
            f"{V2}/job/memory.current": "300000\n",
            f"{V2}/job/memory.stat": "anon 5\ninactive_file 100000\n",
            f"{V2}/job/step/memory.max": "max\n",
            f"{V2}/job/step/memory.current": "300000\n",
        },
        300000,
    ),
    # version 1, with a limit of the step and none above
    (
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:pids:/x\n4:cpuset,memory:/job/step\n",
            f"{V1}/memory.limit_in_bytes": HUGE,
            f"{V1}/memory.usage_in_bytes": "600000\n",
            f"{V1}/job/step/memory.limit_in_bytes": "400000\n",
            f"{V1}/job/step/memory.usage_in_bytes": "399000\n",
            f"{V1}/job/step/memory.stat": "inactive_file 7\ntotal_inactive_file word\n",
        },
        1000,
    ),
    # in a container the path is the host's, and the limit stands at the root
    (
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "4:memory:/docker/abc\n",
            f"{V1}/memory.limit_in_bytes": "700000\n",
            f"{V1}/memory.usage_in_bytes": "600000\n",
        },
        100000,
    ),
    # over the limit: nothing is left, which is not the same as unknown
    (
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            f"{V2}/memory.max": "100\n",
            f"{V2}/memory.current": "200\n",
        },
        1,
    ),
]


@pytest.mark.parametrize(("files", "num_bytes"), CASES)
def test_free_memory(tmp_path: Path, files: dict[str, str], num_bytes: int) -> None:
    assert free_memory(write(tmp_path, files)) == num_bytes


def test_this_machine_says_something_sane() -> None:
    if not Path("/proc/meminfo").exists():
        pytest.skip("no /proc here")
    assert 1 <= free_memory() < 1 << 60


def test_processes_of_a_host_are_told_their_part(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable:    1000 kB\n")
    assert (free_memory(tmp_path), free_memory(tmp_path, parts=4)) == (1_024_000, 256_000)

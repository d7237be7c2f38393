"""How many threads a rank uses: its share of the cores that it may run on, or what the user gave."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hpcps.launch.threads import ThreadShare, given_threads, share_of_cores
from hpcps.torch.devices import use_threads

# cores, processors of this rank, those of the others of the host, threads, reason
SHARES = [
    (8, range(8), [], 8, "8 cores, its own"),
    (8, range(8), [range(8)] * 3, 2, "8 cores, shared by 4 ranks"),
    (4, range(4), [range(4, 8)] * 3, 4, "4 cores, its own"),  # bound by the launcher
    (4, range(8), [range(8), range(8, 16)], 2, "4 cores, shared by 2 ranks"),  # two threads a core
    (4, range(4), [range(3, 6), range(4, 8)], 2, "4 cores, shared by 2 ranks"),
    (2, range(2), [range(2)] * 5, 1, "2 cores, shared by 6 ranks"),
]


@pytest.mark.parametrize(("num_cores", "cpus", "others", "number", "reason"), SHARES)
def test_a_rank_gets_its_share(num_cores: int, cpus: range, others: list[range], number: int, reason: str) -> None:
    share = share_of_cores({}, num_cores=num_cores, cpus=cpus, others=others)
    assert share == ThreadShare(number=number, reason=reason)


def test_what_the_user_gave_is_used() -> None:
    share = share_of_cores({"OMP_NUM_THREADS": "3,2"}, num_cores=8, cpus=range(8), others=[range(8)])
    assert share == ThreadShare(number=3, reason="OMP_NUM_THREADS=3,2")


@pytest.mark.parametrize(("text", "number"), [("", 0), ("0", 0), ("many", 0), (" 5 ", 5), ("4,1", 4), ("-2", 0)])
def test_given_threads(text: str, number: int) -> None:
    assert given_threads({"OMP_NUM_THREADS": text}) == number


@pytest.fixture
def torch_threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_torch_follows_unless_the_script_chose(torch_threads: int) -> None:
    torch.set_num_threads(5)
    assert use_threads(2, {4, 8}) == 5
    assert use_threads(2, {5, 8}) == 2 == torch.get_num_threads()

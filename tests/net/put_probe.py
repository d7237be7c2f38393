"""Shows that one-sided traffic between the ranks crosses the network; run by tests/net/suite.sh, a rank a node.

Every rank puts PAYLOAD_BYTES into the window of the next one. A target makes progress only by testing a pending receive
on COMM_SELF, as the package does. The run fails unless each rank is alone on its node, the bytes arrive unchanged, and
the node's own eth0 counters grow by the payload in both directions.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from hpcps.launch.environment import has_infiniband, mpi_defaults

if TYPE_CHECKING:
    from mpi4py import MPI

PAYLOAD_BYTES = 16 << 20
DEADLINE_S = 60.0
PROGRESS_TAG = 66


def read_counters() -> tuple[int, int]:
    """Bytes sent and received on eth0 of the namespace that this process is in."""
    values = []
    for name in ("tx_bytes", "rx_bytes"):
        with open(f"/sys/class/net/eth0/statistics/{name}") as file:
            values.append(int(file.read()))
    return values[0], values[1]


def put_ring(comm: MPI.Intracomm) -> list[str]:
    """Put a pattern to the next rank; returns what went wrong on this rank."""
    from mpi4py import MPI

    num_elems = PAYLOAD_BYTES // 8
    window = MPI.Win.Allocate(PAYLOAD_BYTES, 8, comm=comm)
    received = np.asarray(window.tomemory()).view(np.int64)
    received[:] = -1
    window.Lock_all()
    progress = MPI.COMM_SELF.Irecv([bytearray(1), MPI.BYTE], source=0, tag=PROGRESS_TAG)

    def wait_for(done: Callable[[], bool]) -> None:
        limit_s = time.monotonic() + DEADLINE_S
        while not done():
            progress.Test()
            time.sleep(0.0002)
            if time.monotonic() > limit_s:
                print(f"put_probe: cannot go on: rank {comm.rank} waited {DEADLINE_S} s", file=sys.stderr, flush=True)
                comm.Abort(1)

    wait_for(comm.Ibarrier().Test)
    sent_before, received_before = read_counters()
    wait_for(comm.Ibarrier().Test)
    target = (comm.rank + 1) % comm.size
    payload = np.arange(num_elems, dtype=np.int64) + comm.rank
    window.Put([payload, MPI.INT64_T], target)
    window.Flush(target)
    wait_for(comm.Ibarrier().Test)
    window.Sync()
    sent_after, received_after = read_counters()

    wrong = []
    source = (comm.rank - 1) % comm.size
    if not np.array_equal(received, np.arange(num_elems, dtype=np.int64) + source):
        wrong.append(f"the bytes from rank {source} did not arrive unchanged")
    for name, grown in (("sent", sent_after - sent_before), ("received", received_after - received_before)):
        if grown < PAYLOAD_BYTES:
            wrong.append(f"eth0 counted {grown} bytes {name}, need {PAYLOAD_BYTES}")
    wait_for(comm.Ibarrier().Test)
    progress.Cancel()
    progress.Wait()
    window.Unlock_all()
    del received
    window.Free()
    return wrong


def main() -> int:
    """Run the probe; rank 0 prints the verdict of all ranks."""
    os.environ.update(mpi_defaults(os.environ, has_infiniband=has_infiniband(), ranks_exceed_cores=True))
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    node_size = comm.Split_type(MPI.COMM_TYPE_SHARED).size
    wrong = [] if node_size == 1 else [f"{node_size} ranks share its node, need 1"]
    if comm.size < 2:
        wrong.append(f"the world has {comm.size} ranks, need 2")
    wrong += put_ring(comm)
    reports = comm.gather([f"rank {comm.rank} on {socket.gethostname()}: {text}" for text in wrong])
    if reports is not None:
        vendor, version = MPI.get_vendor()
        name = f"{vendor} {'.'.join(map(str, version))}"
        print(f"put_probe: {name}, {comm.size} ranks, {PAYLOAD_BYTES} bytes each", flush=True)
        for text in chain.from_iterable(reports):
            print(f"put_probe: {text}", file=sys.stderr, flush=True)
    return 1 if comm.allreduce(len(wrong)) else 0


sys.exit(main())

"""hpcps trains an ordinary PyTorch script on an uneven cluster, as a heterogeneous parameter server over MPI.

Importing this package loads no MPI, torch, CuPy or HDF5; ``init`` does, as far as the job needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from hpcps.runtime.job import Job

__all__ = ["__version__", "init"]

__version__ = "0.1.0"


def init(**settings: object) -> Job:
    """Join the job that the launcher started; a script started by hand is a job of one.

    Use it as a context manager. On a server rank it serves until the job ends, then leaves the process
    with exit code 0.

    Args:
        settings: defaults of this script, by the names of ``hpcps.config.RunConfig``; sections as mappings.
            The settings file and the command line override them.

    Returns: the job, on a worker.

    Raises:
        ConfigError: an unknown setting, or a value that does not fit.
        LaunchError: launcher, MPI library and settings do not fit together.
    """
    import importlib.metadata
    import platform

    from hpcps.runtime.entry import start
    from hpcps.settings import nested_layer, pending, resolve

    def make_rule(shard, spec, tensors):  # type: ignore[no-untyped-def]
        from hpcps.torch.server_optim import make_rule as make

        return make(shard, spec, tensors)

    def device(local_rank: int) -> str:
        from hpcps.torch.devices import device_name

        return device_name(local_rank)

    def gpus() -> tuple[str, ...]:
        from hpcps.torch.devices import gpu_names

        return gpu_names()

    def use_threads(number: int, by_itself: Collection[int]) -> int:
        from hpcps.torch.devices import use_threads as use

        return use(number, by_itself)

    resolved = resolve([nested_layer("script", settings), *pending()])
    python = ".".join(platform.python_version_tuple()[:2])
    torch = importlib.metadata.version("torch").partition("+")[0]  # CPU hosts and GPU hosts have builds of their own
    versions = f"hpcps {__version__}, Python {python}, torch {torch}"
    job = start(
        resolved.config, make_rule=make_rule, device=device, gpus=gpus, use_threads=use_threads, versions=versions
    )
    from hpcps.torch.devices import memory_meter

    job.watch_memory(memory_meter(job.device))
    return job

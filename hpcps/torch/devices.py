"""Which torch device a worker computes on, and how many threads torch uses on the processor."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

__all__ = ["device_name", "gpu_names", "memory_meter", "use_threads"]


def device_name(local_rank: int) -> str:
    """The GPU of a local rank among those visible, or the CPU.

    A launcher that shows each rank one GPU numbers it 0, so the rank is taken modulo what is visible.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"cuda:{local_rank % count}" if count else "cpu"


def gpu_names() -> tuple[str, ...]:
    """Model names of the GPUs that this process sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(torch.cuda.get_device_name(index) for index in range(count))


def memory_meter(name: str) -> Callable[[], tuple[int, int] | None]:
    """What measures the memory of a device; on the processor it knows nothing.

    Each call gives the peak bytes of this process's tensors since the call before, and the bytes that it may hold: what
    is free and what it holds already, so that others on the same GPU count.

    Args:
        name: the device, for example cuda:0.
    """
    device = torch.device(name)

    def measure() -> tuple[int, int] | None:
        if device.type != "cuda":
            return None
        peak_bytes = torch.cuda.max_memory_allocated(device)
        free_bytes, _ = torch.cuda.mem_get_info(device)
        total_bytes = free_bytes + torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak_bytes, total_bytes

    return measure


def use_threads(number: int, by_itself: Collection[int]) -> int:
    """Let one operation of torch use so many threads, unless the script has chosen a number.

    Args:
        number: threads, at least 1.
        by_itself: what torch takes where nobody chose.

    Returns: threads that it uses now.
    """
    if torch.get_num_threads() in by_itself:
        torch.set_num_threads(number)
    return torch.get_num_threads()

"""Which torch device a worker computes on."""

from __future__ import annotations

import torch

__all__ = ["device_name", "gpu_names"]


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

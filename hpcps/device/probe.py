"""Is there a GPU that this process can use, and if not, why not and what to do. Refuses to judge MPI libraries."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from hpcps.errors import NotBuiltError

__all__ = ["DeviceProbe", "probe", "require_device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProbe:
    """What was found.

    Args:
        why_not: why no device can be used, with the remedy; empty where one can.
        num_devices: devices that this process sees.
        name: the current device's.
        compute_capability: the current device's, major and minor.
    """

    why_not: str
    num_devices: int = 0
    name: str = ""
    compute_capability: tuple[int, int] = (0, 0)

    @property
    def usable(self) -> bool:
        """True if device arrays and kernels can be used."""
        return not self.why_not


def probe() -> DeviceProbe:
    """Look for CuPy, a driver, a device and the compiler of kernels, in this order. Never raises."""
    try:
        cupy = importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        return DeviceProbe(why_not=f"cannot use a GPU: {error}; pip install 'hpcps[gpu]'")
    except Exception as error:
        return DeviceProbe(why_not=f"cannot use a GPU: cupy does not load: {error}; install it again: 'hpcps[gpu]'")
    try:
        num_devices = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:
        return DeviceProbe(
            why_not=f"cannot use a GPU: {error}; install or update the NVIDIA driver, or ask the job for a GPU"
        )
    if num_devices == 0:
        return DeviceProbe(
            why_not="cannot use a GPU: this process sees none; ask the job for one, or look at CUDA_VISIBLE_DEVICES"
        )
    return _probe_device(cupy, num_devices)


def _probe_device(cupy: Any, num_devices: int) -> DeviceProbe:
    try:
        cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        return DeviceProbe(
            why_not=f"cannot use a GPU: kernels cannot be compiled: {error}; pip install 'cupy-cuda12x[ctk]'",
            num_devices=num_devices,
        )
    try:
        facts = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        cupy.zeros(1, dtype="float32")
    except Exception as error:
        return DeviceProbe(
            why_not=f"cannot use a GPU: {error}; see whether another process holds it (nvidia-smi)",
            num_devices=num_devices,
        )
    name = facts["name"]
    return DeviceProbe(
        why_not="",
        num_devices=num_devices,
        name=name.decode() if isinstance(name, bytes) else str(name),
        compute_capability=(int(facts["major"]), int(facts["minor"])),
    )


def require_device() -> DeviceProbe:
    """The probe's findings.

    Raises:
        NotBuiltError: no device can be used.
    """
    found = probe()
    if not found.usable:
        raise NotBuiltError(found.why_not)
    return found

"""Arrays on a GPU: is there a device, views of foreign tensors, codecs by CUDA kernels, staging to the host.

CuPy is imported inside functions, so this room loads without it. Everything but the probe is written against an array
module and a kernel module handed in, and runs on numpy with a stand-in for the kernels too. Refuses to talk to MPI and
to decide whether an MPI takes device memory.
"""

from __future__ import annotations

from hpcps.device.arrays import ArrayModule, DeviceArray, device_view
from hpcps.device.codecs import DeviceCodecs, Encoding
from hpcps.device.module import BuiltModule, KernelModule, kernel_source, load_module
from hpcps.device.probe import DeviceProbe, probe, require_device
from hpcps.device.staging import HostCopier, Slot, StagingRing, StreamCopier

__all__ = [
    "ArrayModule",
    "BuiltModule",
    "DeviceArray",
    "DeviceCodecs",
    "DeviceProbe",
    "Encoding",
    "HostCopier",
    "KernelModule",
    "Slot",
    "StagingRing",
    "StreamCopier",
    "device_view",
    "kernel_source",
    "load_module",
    "probe",
    "require_device",
]

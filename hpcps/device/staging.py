"""Payloads from the device to host memory that MPI can send from, while the device goes on.

A ring of host slots of one size. ``stage`` starts a copy into a free slot and returns at once; ``Slot.wait`` gives the
bytes when they are there; ``Slot.release`` hands the slot back once the message has left.

    device   | encode a | encode b | encode c |
    copies              | a to 0   | b to 1   | c to 2   |
    host                           | send 0   | send 1   | ...

With a device the slots are pinned and the copies run on a stream of their own, behind what the current stream has
under way. Without one they are plain memory and the copy is made at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hpcps.device.arrays import DeviceArray
from hpcps.errors import ChannelError
from hpcps.units import format_bytes

__all__ = ["Copier", "HostCopier", "Slot", "StagingRing", "StreamCopier"]

Bytes: TypeAlias = npt.NDArray[np.uint8]


class Copier(Protocol):
    """How bytes come to the host."""

    def allocate(self, num_bytes: int) -> Bytes:
        """Host memory for all slots."""

    def start(self, source: DeviceArray, target: Bytes) -> Callable[[], None]:
        """Start a copy; returns what waits for its end."""


class HostCopier:
    """Where there is no device: plain memory, copied at once."""

    def allocate(self, num_bytes: int) -> Bytes:
        return np.empty(num_bytes, np.uint8)

    def start(self, source: DeviceArray, target: Bytes) -> Callable[[], None]:
        np.copyto(target, source)  # type: ignore[arg-type]  # of numpy where there is no device
        return lambda: None


class StreamCopier:
    """Pinned memory and a stream for copies.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def allocate(self, num_bytes: int) -> Bytes:
        memory = self._cupy.cuda.alloc_pinned_memory(num_bytes)
        return np.frombuffer(memory, np.uint8, num_bytes)

    def start(self, source: DeviceArray, target: Bytes) -> Callable[[], None]:
        ready = self._cupy.cuda.get_current_stream().record()
        self._stream.wait_event(ready)
        source.get(stream=self._stream, out=target, blocking=False)  # type: ignore[attr-defined]  # of cupy
        done = self._stream.record()

        def wait() -> None:
            done.synchronize()

        return wait


class Slot:
    """A payload on its way to the host. Keeps the device's memory until it has arrived."""

    def __init__(self, index: int, source: DeviceArray, view: Bytes, finish: Callable[[], None]) -> None:
        self.index = index
        self._source: DeviceArray | None = source
        self._view = view
        self._finish = finish

    def wait(self) -> Bytes:
        """The payload in host memory, valid until the slot is released."""
        if self._source is not None:
            self._finish()
            self._source = None
        return self._view


class StagingRing:
    """Host slots for payloads.

    Args:
        num_slots: payloads that can be on their way at a time, at least 1.
        slot_bytes: largest payload, at least 1.
        copier: how bytes come to the host.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, copier: Copier) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError(f"cannot make a ring: {num_slots} slots of {slot_bytes} B, need 1 or more; correct them")
        self._slot_bytes = slot_bytes
        self._copier = copier
        memory = copier.allocate(num_slots * slot_bytes)
        self._slots = [memory[begin : begin + slot_bytes] for begin in range(0, num_slots * slot_bytes, slot_bytes)]
        self._free = list(range(num_slots))
        self._taken: dict[int, Slot] = {}

    @property
    def num_free(self) -> int:
        """Slots that a payload can go to."""
        return len(self._free)

    def stage(self, payload: DeviceArray) -> Slot:
        """Start the copy of a payload.

        Args:
            payload: uint8 on the device; it must not be written before the slot has been waited for.

        Raises:
            ChannelError: the payload is larger than a slot, or no slot is free.
        """
        if payload.size > self._slot_bytes:
            raise ChannelError(
                f"cannot stage a payload: {format_bytes(payload.size)}, a slot has {format_bytes(self._slot_bytes)};"
                " make larger slots"
            )
        if not self._free:
            raise ChannelError(
                f"cannot stage a payload: all {len(self._slots)} slots are taken; release one, or make more slots"
            )
        index = self._free.pop(0)
        view = self._slots[index][: payload.size]
        slot = Slot(index, payload, view, self._copier.start(payload, view))
        self._taken[index] = slot
        return slot

    def release(self, slot: Slot) -> None:
        """Hand a slot back, once its message has left.

        Raises:
            ChannelError: it was handed back before.
        """
        if self._taken.get(slot.index) is not slot:
            raise ChannelError(f"cannot release slot {slot.index}: it was released before; release each slot once")
        slot.wait()
        del self._taken[slot.index]
        self._free.append(slot.index)

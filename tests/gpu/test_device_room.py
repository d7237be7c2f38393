"""The device room without kernels: finding a device, views of tensors, staging, the text that CuPy compiles."""

from __future__ import annotations

import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from host_module import KERNELS

from hpcps import native
from hpcps.device import (
    BuiltModule,
    HostCopier,
    StagingRing,
    StreamCopier,
    codecs,
    device_view,
    kernel_source,
    load_module,
    probe,
    require_device,
    topk,
)
from hpcps.device.arrays import address_of
from hpcps.errors import ChannelError, DataError, NotBuiltError
from hpcps.plan import Codec

# --- is there a device ------------------------------------------------------------------------------------------------


def fail(message: str):
    def call(*args: object, **options: object) -> None:
        raise RuntimeError(message)

    return call


def fake_cupy(*, num_devices=1, count=None, nvrtc=None, zeros=None) -> ModuleType:
    """As much of CuPy as the probe asks; each step can be made to fail."""
    properties = {"name": b"Fake GPU", "major": 9, "minor": 0}
    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(
        runtime=SimpleNamespace(
            getDeviceCount=count or (lambda: num_devices),
            getDevice=lambda: 0,
            getDeviceProperties=lambda device: properties,
        ),
        nvrtc=SimpleNamespace(getVersion=nvrtc or (lambda: (12, 9))),
    )
    cupy.zeros = zeros or (lambda shape, dtype: np.zeros(shape, dtype))
    return cupy


PROBES = [
    (None, r"^cannot use a GPU: .*; pip install 'hpcps\[gpu\]'$"),
    (fake_cupy(count=fail("no driver")), r"^cannot use a GPU: no driver; install or update the NVIDIA driver, or ask"),
    (fake_cupy(num_devices=0), r"^cannot use a GPU: this process sees none; ask the job for one, or look at CUDA_"),
    (fake_cupy(nvrtc=fail("no libnvrtc")), r"^cannot use a GPU: kernels cannot be compiled: no libnvrtc; pip install"),
    (fake_cupy(zeros=fail("out of memory")), r"^cannot use a GPU: out of memory; see whether another process holds it"),
]


@pytest.mark.parametrize(("cupy", "message"), PROBES)
def test_probe_names_the_first_cause_and_the_remedy(monkeypatch, cupy, message):
    monkeypatch.setitem(sys.modules, "cupy", cupy)  # None: importing it fails
    found = probe()
    assert not found.usable
    assert re.search(message, found.why_not)
    with pytest.raises(NotBuiltError, match=message):
        require_device()


def test_probe_describes_the_device(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(num_devices=4))
    found = require_device()
    assert (found.usable, found.num_devices, found.name, found.compute_capability) == (True, 4, "Fake GPU", (9, 0))


def test_the_room_loads_without_cupy(monkeypatch):
    code = "import sys; sys.modules['cupy'] = None; import hpcps.device; print(hpcps.device.probe().usable)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_kernels_cannot_be_loaded_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NotBuiltError, match=r"^cannot load the CUDA kernels: .*; pip install 'hpcps\[gpu\]'$"):
        load_module()


@pytest.mark.parametrize(
    ("native", "message"),
    [
        (None, r"^cannot load the built CUDA kernels: .*; install with HPCPS_EXT=on$"),
        (SimpleNamespace(), r"^cannot load the built CUDA kernels: hpcps._native was built without CUDA; put nvcc on"),
        (
            SimpleNamespace(cuda_launch=None, cuda_device_count=lambda: (0, "no driver")),
            r"^cannot use the built CUDA kernels: no driver; install or repair the NVIDIA driver$",
        ),
    ],
)
def test_built_kernels_give_the_reason(monkeypatch, native, message):
    monkeypatch.setitem(sys.modules, "hpcps._native", native)
    with pytest.raises(NotBuiltError, match=message):
        BuiltModule()


def test_built_kernels_get_plain_arguments(monkeypatch):
    calls = []
    native = SimpleNamespace(
        cuda_launch=lambda *args: calls.append(args),
        cuda_device_count=lambda: (1, ""),
        cuda_arguments=lambda name: "ppli" + "f",
    )
    monkeypatch.setitem(sys.modules, "hpcps._native", native)
    kernel = BuiltModule(stream=lambda: 77).get_function("some_kernel")
    array = np.zeros(4, np.float32)
    kernel((3,), (256,), (array, np.uint64(0), np.int64(5), np.int32(-1), np.float32(0.5)))
    assert calls == [("some_kernel", 3, 256, [array.ctypes.data, 0, 5, -1, 0.5], 77)]
    with pytest.raises(TypeError, match=r"^cannot launch some_kernel: 1 arguments, need 5; correct the call$"):
        kernel((3,), (256,), (array,))


def test_built_and_shim_kernels_are_the_same():
    listed = re.compile(r"ENTRY\((hpcps_\w+)\)")
    launch = (KERNELS.parents[1] / "ext" / "cuda_launch.cu").read_text()
    shim = (KERNELS.parents[1] / "tests" / "gpu" / "shim_library.cpp").read_text()
    defined = set(re.findall(r"^HPCPS_KERNEL (hpcps_\w+)\(", kernel_source(), flags=re.MULTILINE))
    assert set(listed.findall(launch)) == set(listed.findall(shim)) == defined
    assert len(defined) == 21


# --- constants that stand in two languages ----------------------------------------------------------------------------


def enumerators(text: str, first: str) -> list[str]:
    """Names of the enum that begins with one."""
    body = re.search(r"enum \{\s*" + first + r"\b.*?\}", text, flags=re.DOTALL).group()
    return re.findall(r"(HPCPS_\w+)", body)


def test_words_of_the_states_are_where_python_looks():
    text = kernel_source()
    state = enumerators(text, "HPCPS_STATE_BYTES")
    assert state[:2] == ["HPCPS_STATE_BYTES", "HPCPS_STATE_NOT_FINITE"]
    assert state.index("HPCPS_STATE_WORDS") == codecs._STATE_WORDS
    assert state.index("HPCPS_STATE_SCANNED") == topk._STATE_SCANNED
    assert state.index("HPCPS_STATE_GAP_BYTES") == topk._STATE_GAP_BYTES
    assert "HPCPS_READ_SOUND = 4," in text
    read = ["header"] * 3 + enumerators(text, "HPCPS_READ_HEADER")  # the header has four words
    assert read.index("HPCPS_READ_SOUND") == topk._READ_SOUND
    assert read.index("HPCPS_READ_COUNT") == topk._READ_COUNT
    assert read.index("HPCPS_READ_SPAN") == topk._READ_SPAN
    assert read.index("HPCPS_READ_WORDS") == topk._READ_WORDS


def test_codecs_have_the_numbers_of_the_wire():
    assert [name.upper() for name in codecs._NAMES] == [codec.name for codec in Codec][: len(codecs._NAMES)]
    numbers = dict(re.findall(r"HPCPS_(NONE|FP32|FP16|BF16|INT8|ONEBIT) = (\d)", kernel_source()))
    assert {name: int(number) for name, number in numbers.items()} == {
        codec.name: int(codec) for codec in Codec if codec.name in numbers
    }
    assert len(numbers) == 6


def test_the_text_for_cupy_is_whole():
    text = kernel_source()
    assert '#include "' not in text and "#pragma once" not in text
    assert text.index("HPCPS_ELEMENT float hpcps_of_half") < text.index("HPCPS_KERNEL hpcps_encode_fp16_kernel")
    assert text.index("HPCPS_KERNEL hpcps_encode_fp16_kernel") < text.index("HPCPS_KERNEL hpcps_topk_add_kernel")


# --- views ------------------------------------------------------------------------------------------------------------


class FakeTensor:
    """A tensor that says it is somewhere."""

    def __init__(self, kind: int, index: int) -> None:
        self.place = (kind, index)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self, **options: object) -> object:
        raise BufferError("it records gradients")


def test_a_tensor_is_looked_at_in_place():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    view = device_view(tensor, np)
    assert view.shape == (6,) and address_of(view) == tensor.data_ptr()
    tensor[1, 2] = 9
    assert view[5] == 9
    with pytest.raises(DataError, match=r"strides \(4, 12\) for shape \(3, 2\), need contiguous elements; copy it$"):
        device_view(tensor.T, np)
    with pytest.raises(DataError, match=r"^cannot look at a Tensor on the device: .*; detach it, or copy it"):
        device_view(torch.ones(3, requires_grad=True), np)


def test_a_tensor_elsewhere_is_refused():
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0)))
    for tensor, xp, message in [
        (FakeTensor(2, 0), np, r"^cannot look at a FakeTensor on the device: it is in memory of kind 2, need host"),
        (FakeTensor(1, 0), cupy, r"it is in memory of kind 1, need CUDA memory; move it to the device$"),
        (FakeTensor(3, 0), cupy, r"it is in memory of kind 3, need CUDA memory"),
        (FakeTensor(2, 1), cupy, r"it is on device 1, current is device 0; use one device a process$"),
        (FakeTensor(1, 0), np, r"it records gradients; detach it, or copy it into a plain tensor$"),
        ([1.0], np, r"^cannot look at a list on the device: it has neither __dlpack__ nor __cuda_array_interface__"),
    ]:
        with pytest.raises(DataError, match=message):
            device_view(tensor, xp)


def test_an_address_is_that_of_the_elements():
    array = np.zeros(8, np.float32)
    assert address_of(array[3:]) == array.ctypes.data + 12
    with pytest.raises(TypeError, match=r"^cannot take the address of a list: need an array of cupy or numpy"):
        address_of([])


# --- staging ----------------------------------------------------------------------------------------------------------


class SlowArray(SimpleNamespace):
    """A device array whose copy ends when its event is waited for."""

    def get(self, *, stream, out, blocking) -> None:
        assert not blocking
        stream.log.append("copy")
        stream.pending.append((out, self.values))


class FakeEvent:
    def __init__(self, stream) -> None:
        self._stream = stream

    def synchronize(self) -> None:
        self._stream.log.append("wait")
        for out, values in self._stream.pending:
            out[:] = values
        self._stream.pending.clear()


class FakeStream:
    def __init__(self, log: list[str]) -> None:
        self.log, self.pending = log, []

    def record(self) -> FakeEvent:
        self.log.append("record")
        return FakeEvent(self)

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append("wait_event")


def fake_streams(log: list[str]):
    """As much of CuPy as staging uses, which logs it."""
    return SimpleNamespace(
        cuda=SimpleNamespace(
            Stream=lambda non_blocking: FakeStream(log),
            get_current_stream=lambda: FakeStream(log),
            alloc_pinned_memory=bytearray,
        )
    )


def ring_and_payloads(kind: str):
    values = [np.full(size, size, np.uint8) for size in (3, 8, 5)]
    if kind == "host":
        return StagingRing(2, 8, copier=HostCopier()), values
    log: list[str] = []
    arrays = [SlowArray(size=each.size, values=each) for each in values]
    return StagingRing(2, 8, copier=StreamCopier(fake_streams(log))), arrays


@pytest.mark.parametrize("kind", ["host", "stream"])
def test_payloads_go_through_the_ring(kind):
    ring, payloads = ring_and_payloads(kind)
    first, second = ring.stage(payloads[0]), ring.stage(payloads[1])
    with pytest.raises(
        ChannelError, match=r"^cannot stage a payload: all 2 slots are taken; release one, or make more"
    ):
        ring.stage(payloads[2])
    assert first.wait().tolist() == [3] * 3
    ring.release(first)
    third = ring.stage(payloads[2])
    assert third.index == first.index
    assert second.wait().tolist() == [8] * 8 and third.wait().tolist() == [5] * 5
    ring.release(second)
    ring.release(third)
    assert ring.num_free == 2
    with pytest.raises(ChannelError, match=r"^cannot release slot 1: it was released before; release each slot once$"):
        ring.release(second)


def test_a_copy_waits_for_the_current_stream_and_no_longer():
    log: list[str] = []
    ring = StagingRing(2, 8, copier=StreamCopier(fake_streams(log)))
    slot = ring.stage(SlowArray(size=4, values=np.arange(4, dtype=np.uint8)))
    assert log == ["record", "wait_event", "copy", "record"]  # nothing waited for on the host
    assert slot.wait().tolist() == [0, 1, 2, 3]
    slot.wait()
    assert log == ["record", "wait_event", "copy", "record", "wait"]


def test_a_ring_refuses_what_does_not_fit():
    ring = StagingRing(1, 8, copier=HostCopier())
    with pytest.raises(ChannelError, match=r"^cannot stage a payload: 9 B, a slot has 8 B; make larger slots$"):
        ring.stage(np.zeros(9, np.uint8))
    with pytest.raises(ValueError, match=r"^cannot make a ring: 0 slots of 8 B, need 1 or more; correct them$"):
        StagingRing(0, 8, copier=HostCopier())


def test_the_whole_way_of_a_gradient(rig):
    """Encode on the device, stage the payload alone, decode it as a server does."""
    if rig.name == "built":
        pytest.skip("staging needs CuPy")
    gradient = np.random.default_rng(0).standard_normal(3000).astype(np.float32)
    x, residual, out = rig.to_device(gradient), rig.xp.zeros(3000, np.float32), rig.xp.empty(6000, np.uint8)
    ring = StagingRing(2, 6000, copier=StreamCopier(rig.xp) if rig.name == "cupy" else HostCopier())
    total = np.zeros(3000, np.float32)
    for codec in (Codec.FP16, Codec.INT8, Codec.TOPK):
        num_bytes, _ = rig.codecs.encode(codec, x, out, residual=residual, keep=60)
        slot = ring.stage(out[:num_bytes])
        native.decode_accumulate(total, [slot.wait()], [codec], [1.0])
        ring.release(slot)
    assert np.abs(total + rig.to_host(residual) - 3 * gradient).max() < 1e-5


def test_a_tensor_on_the_device_is_looked_at_in_place(rig):
    torch = pytest.importorskip("torch")
    if rig.name != "cupy" or not torch.cuda.is_available():
        pytest.skip("needs a GPU, CuPy and torch with CUDA")
    tensor = torch.arange(3000, dtype=torch.float32, device="cuda")
    view = device_view(tensor, rig.xp)
    assert address_of(view) == tensor.data_ptr()
    out = rig.xp.empty(6000, np.uint8)
    rig.codecs.encode(Codec.FP16, view, out)
    assert np.array_equal(rig.to_host(out).view(np.float16), np.arange(3000, dtype=np.float16))

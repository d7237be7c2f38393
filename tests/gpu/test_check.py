"""What runs on a machine with a GPU runs here too: the extension's functions are played by the shim and host memory."""

from __future__ import annotations

import ctypes
import sys

import check
import numpy as np
import pytest
from host_module import MOST_ARGUMENTS, build_library, compiler
from rigs import Rig, make_rig
from test_gpu_codecs import check_encode, numbers, payloads_of, same_bits

from hpcps import native
from hpcps.plan import Codec

TYPES = {"l": np.int64, "i": np.int32, "f": np.float32, "p": np.uint64}


class FakeNative:
    """``hpcps._native`` with CUDA, on memory of the host."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(build_library()))
        self._library.shim_arguments.restype = ctypes.c_char_p
        self._memory: dict[int, np.ndarray] = {}

    def cuda_device_count(self) -> tuple[int, str]:
        return 1, ""

    def cuda_arguments(self, name: str) -> str:
        sizes = (ctypes.c_int * MOST_ARGUMENTS)()
        kinds = self._library.shim_arguments(name.encode(), sizes)
        if kinds is None:
            raise KeyError(name)
        return "".join(
            "l" if (kind, size) == ("i", 8) else kind for kind, size in zip(kinds.decode(), sizes, strict=False)
        )

    def cuda_launch(self, name: str, num_blocks: int, num_threads: int, args: list, stream: int) -> None:
        assert stream == 0 and all(type(arg) in (int, float) for arg in args)
        values = [np.array([arg], TYPES[kind]) for kind, arg in zip(self.cuda_arguments(name), args, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        message = ctypes.create_string_buffer(200)
        sizes = [(ctypes.c_uint * 3)(size, 1, 1) for size in (num_blocks, num_threads)]
        failed = self._library.shim_launch(name.encode(), *sizes, pointers, message, len(message))
        assert not failed, message.value

    def cuda_allocate(self, num_bytes: int) -> int:
        memory = np.full(num_bytes + 16, 0x5A, np.uint8)
        address = memory.ctypes.data + -memory.ctypes.data % 16
        self._memory[address] = memory
        return address

    def cuda_fill(self, memory: int, byte: int, num_bytes: int) -> None:
        ctypes.memset(memory, byte, num_bytes)

    def cuda_copy(self, to: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(to, source, num_bytes)

    def cuda_synchronize(self) -> None:
        pass


@pytest.fixture
def built(monkeypatch) -> Rig:
    if not compiler():
        pytest.skip("no C++ compiler to build the kernels for the CPU")
    monkeypatch.setitem(sys.modules, "hpcps._native", FakeNative())
    return make_rig("built")


@pytest.mark.parametrize("codec", list(Codec))
def test_codecs_run_through_the_extension(built, codec):
    numel = 2500
    keep = 70 if codec is Codec.TOPK else 0
    check_encode(built, codec, numbers(1, numel), numbers(2, numel), keep=keep, offset=1)
    payloads = payloads_of([codec, codec], numel, 3)
    acc, expected = built.to_device(numbers(4, numel)), numbers(4, numel)
    built.codecs.decode_accumulate(acc, [built.to_device(each) for each in payloads], [codec] * 2, [0.5, 2.0])
    native.decode_accumulate(expected, payloads, [codec] * 2, [0.5, 2.0])
    assert same_bits(built.to_host(acc), expected)


def test_every_kernel_is_timed_and_reported(built, capsys, monkeypatch):
    monkeypatch.setattr(check, "TURNS", 1)
    monkeypatch.setattr(check, "REPEATS", 1)
    check.report("built", check.measure("built", 5000), 5000)
    lines = capsys.readouterr().out.splitlines()
    figures = [line.split() for line in lines if line.startswith("figure ")]
    assert len(figures) == 6 * 4 + 2 + 2
    assert all(name.startswith("gpu_built_") and state in ("ok", "SHORT") for _, name, _, _, state in figures)
    assert "figure gpu_built_int8_encode_with_feedback" in " ".join(lines)


def test_without_a_driver_the_reason_is_given(monkeypatch):
    def load(name: str) -> None:
        raise OSError("libcuda.so.1: no such file")

    monkeypatch.setattr(check.ctypes, "CDLL", load)
    assert check.find_gpu() == ("", "no NVIDIA driver (libcuda.so.1: no such file)")


def test_without_a_gpu_the_tests_run_on_the_cpu(monkeypatch, capsys):
    monkeypatch.setattr(check, "find_gpu", lambda: ("", "no NVIDIA driver"))
    monkeypatch.setattr(check, "run_tests", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["check.py"])
    assert check.main() == 0
    assert (
        "gpu-check: no GPU here: no NVIDIA driver; testing the kernels on this CPU instead" in capsys.readouterr().out
    )

"""The codecs beside torch's way of doing the same, one thread, in one run: rates, share of a plain copy, ratios.

Times are CPU time of this thread, a quarter from the best of some rounds in which all take turns. Bytes are those read
and written once each. ``--threads`` shows our kernels on several threads (wall time) and prints no figures.

    python tests/bench/codecs.py [--elems N] [--rounds N] [--threads N]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from runs import Figure

from hpcps import native
from hpcps.plan import Codec, CodecSpec

BLOCK = 256
WEIGHT = 0.25
KEEP_FRAC = 0.01
THRESHOLD = 2.5884  # leaves 1 % of normal numbers of variance 1.01: gradient plus residual
SLOW_ROUNDS = 2
SLOW_S = 0.5


@dataclass(slots=True)
class Entry:
    """One way to do one thing."""

    what: str
    who: str
    num_bytes: float
    run: Callable[[], object]
    before: Callable[[], object] | None = None
    times_s: list[float] = field(default_factory=list)

    @property
    def best_s(self) -> float:
        """The best quarter's worst: a clock that once misses a part of the time does not rule."""
        return sorted(self.times_s)[len(self.times_s) // 4]


class Arrays:
    """The data of all entries: numpy arrays and torch views of the same memory."""

    def __init__(self, num_elems: int) -> None:
        rng = np.random.default_rng(0)
        self.n = num_elems
        self.keep = CodecSpec.parse(f"topk:{KEEP_FRAC}").keep(num_elems)
        self.gradient = rng.standard_normal(num_elems, dtype=np.float32)
        self.residual = rng.standard_normal(num_elems, dtype=np.float32) * np.float32(0.1)
        self.owed = self.residual.copy()
        self.acc = np.ones(num_elems, np.float32)
        self.copy = np.ones(num_elems, np.float32)
        self.out = np.ones(CodecSpec(codec=Codec.NONE).wire_bytes(num_elems) + 64, np.uint8)
        self.payloads = {codec: self._encoded(codec) for codec in (Codec.FP16, Codec.INT8, Codec.ONEBIT, Codec.TOPK)}
        self.four = {codec: [self.payloads[codec].copy() for _ in range(4)] for codec in (Codec.FP16, Codec.INT8)}
        self.t_gradient, self.t_owed = torch.from_numpy(self.gradient), torch.from_numpy(self.owed)
        self.t_acc, self.t_copy = torch.from_numpy(self.acc), torch.from_numpy(self.copy)
        self.t_half = torch.from_numpy(self.payloads[Codec.FP16].view(np.float16))
        self.t_half_out = torch.empty(num_elems, dtype=torch.float16).fill_(1)
        self.t_bfloat_out = torch.empty(num_elems, dtype=torch.bfloat16).fill_(1)
        self.t_int8 = torch.from_numpy(rng.integers(-127, 128, num_elems, np.int8))
        self.t_scales = torch.rand(num_elems // BLOCK) + 0.5
        self.t_sum = torch.empty(num_elems)

    def encode(self, codec: Codec, *, feedback: bool = False) -> tuple[int, int]:
        keep = self.keep if codec is Codec.TOPK else 0
        residual = self.owed if feedback else None
        return native.encode(codec, self.gradient, self.out, residual=residual, keep=keep)

    def decode(self, codec: Codec, payloads: list[np.ndarray]) -> None:
        count = len(payloads)
        native.decode_accumulate(self.acc, payloads, [codec] * count, [WEIGHT] * count)

    def restore(self) -> None:
        self.owed[:] = self.residual

    def _encoded(self, codec: Codec) -> np.ndarray:
        num_bytes, _ = self.encode(codec)
        return self.out[:num_bytes].copy()


def torch_int8(a: Arrays) -> torch.Tensor:
    blocks = a.t_gradient.view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    a.t_int8.copy_((blocks / scales).round_().view(-1))
    return scales


def torch_add_int8(a: Arrays) -> None:
    a.t_acc.view(-1, BLOCK).add_(a.t_int8.view(-1, BLOCK) * (WEIGHT * a.t_scales).unsqueeze(1))


def torch_select(a: Arrays) -> tuple[torch.Tensor, torch.Tensor]:
    """Error feedback and selection, the threshold given."""
    values = torch.add(a.t_gradient, a.t_owed, out=a.t_sum)
    index = (values.abs() >= THRESHOLD).nonzero().squeeze(1)
    chosen = values[index]
    halves = chosen.half()
    a.t_owed.copy_(values)
    a.t_owed[index] = chosen - halves.float()
    return index.int(), halves


def torch_topk(a: Arrays) -> torch.Tensor:
    return torch.topk(a.t_gradient.abs(), a.keep, sorted=False).indices


def torch_add_four(a: Arrays) -> None:
    for _ in range(4):
        a.t_acc.add_(a.t_half, alpha=WEIGHT)


def entries(a: Arrays) -> list[Entry]:
    """Ours stands before torch's."""
    mb = 4.0 * a.n
    one = {codec: [payload] for codec, payload in a.payloads.items()}
    fp16, int8, onebit, topk = Codec.FP16, Codec.INT8, Codec.ONEBIT, Codec.TOPK
    return [
        Entry("copy", "numpy", 2 * mb, lambda: np.copyto(a.copy, a.gradient)),
        Entry("copy", "torch", 2 * mb, lambda: a.t_copy.copy_(a.t_gradient)),
        Entry("encode fp16", "hpcps", 1.5 * mb, lambda: a.encode(fp16)),
        Entry("encode fp16", "torch copy_", 1.5 * mb, lambda: a.t_half_out.copy_(a.t_gradient)),
        Entry("encode bf16", "hpcps", 1.5 * mb, lambda: a.encode(Codec.BF16)),
        Entry("encode bf16", "torch copy_", 1.5 * mb, lambda: a.t_bfloat_out.copy_(a.t_gradient)),
        Entry("encode int8", "hpcps", 1.25 * mb, lambda: a.encode(int8)),
        Entry("encode int8", "torch", 1.25 * mb, lambda: torch_int8(a)),
        Entry("encode 1 bit", "hpcps", 1.03 * mb, lambda: a.encode(onebit)),
        Entry(
            "encode 1 bit",
            "torch, bits not packed",
            1.03 * mb,
            lambda: (a.t_gradient.view(-1, BLOCK).abs().mean(1), a.t_gradient < 0),
        ),
        Entry("feedback + fp16", "hpcps", 3.5 * mb, lambda: a.encode(fp16, feedback=True), a.restore),
        Entry("feedback + int8", "hpcps", 3.25 * mb, lambda: a.encode(int8, feedback=True), a.restore),
        Entry("feedback + 1 bit", "hpcps", 3.03 * mb, lambda: a.encode(onebit, feedback=True), a.restore),
        Entry("feedback + top 1 %", "hpcps", 3 * mb, lambda: a.encode(topk, feedback=True), a.restore),
        Entry("feedback + top 1 %", "torch, threshold given", 3 * mb, lambda: torch_select(a), a.restore),
        Entry("feedback + top 1 %", "torch.topk alone", mb, lambda: torch_topk(a)),
        Entry("acc += w fp16", "hpcps", 2.5 * mb, lambda: a.decode(fp16, one[fp16])),
        Entry("acc += w fp16", "torch add_", 2.5 * mb, lambda: a.t_acc.add_(a.t_half, alpha=WEIGHT)),
        Entry("acc += 4 x w fp16", "hpcps, one pass", 4 * mb, lambda: a.decode(fp16, a.four[fp16])),
        Entry("acc += 4 x w fp16", "torch add_, four", 4 * mb, lambda: torch_add_four(a)),
        Entry("acc += w int8", "hpcps", 2.25 * mb, lambda: a.decode(int8, one[int8])),
        Entry("acc += w int8", "torch add_", 2.25 * mb, lambda: torch_add_int8(a)),
        Entry("acc += 4 x w int8", "hpcps, one pass", 3 * mb, lambda: a.decode(int8, a.four[int8])),
        Entry("acc += w 1 bit", "hpcps", 2.03 * mb, lambda: a.decode(onebit, one[onebit])),
        Entry("acc += w top 1 %", "hpcps", 0.05 * mb, lambda: a.decode(topk, one[topk])),
    ]


BARS = (  # figure, what, the other, bar
    ("encode_fp16", "encode fp16", "torch copy_", 1.0),
    ("encode_bf16", "encode bf16", "torch copy_", 1.0),
    ("encode_int8", "encode int8", "torch", 10.0),
    ("encode_onebit", "encode 1 bit", "torch, bits not packed", 10.0),
    ("feedback_topk_given", "feedback + top 1 %", "torch, threshold given", 15.0),
    ("feedback_topk", "feedback + top 1 %", "torch.topk alone", 50.0),
    ("accumulate_fp16", "acc += w fp16", "torch add_", 8.0),
    ("accumulate_int8", "acc += w int8", "torch add_", 10.0),
)


def measure(found: list[Entry], rounds: int, clock: Callable[[], float]) -> None:
    """All entries in turn, and again; the slow ones twice."""
    for round_ in range(rounds):
        for entry in found:
            if round_ >= SLOW_ROUNDS and entry.best_s > SLOW_S:
                continue
            if entry.before is not None:
                entry.before()
            began_s = clock()
            entry.run()
            entry.times_s.append(clock() - began_s)


def show(found: list[Entry], title: str) -> None:
    table = Table(title=title)
    for name in ("what", "by", "ms", "GB/s", "of a copy", "times as fast"):
        table.add_column(name, justify="left" if name in ("what", "by") else "right")
    copy = found[0].num_bytes / found[0].best_s
    ours = {entry.what: entry.best_s for entry in found if entry.who.startswith("hpcps")}
    for entry in found:
        rate = entry.num_bytes / entry.best_s
        mine = entry.who.startswith("hpcps") or entry.what not in ours
        ratio = "" if mine else f"hpcps {entry.best_s / ours[entry.what]:.1f} x"
        table.add_row(
            entry.what, entry.who, f"{1e3 * entry.best_s:.1f}", f"{rate / 1e9:.1f}", f"{rate / copy:.2f}", ratio
        )
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--elems", type=int, default=1 << 24, help="elements, a multiple of 256 (default 16 Mi)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds, at least 1")
    parser.add_argument("--threads", type=int, default=1, help="threads of our pool and of torch; above 1: wall time")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    native.set_num_threads(arguments.threads)
    found = entries(Arrays(arguments.elems))
    single = arguments.threads == 1
    measure(found, arguments.rounds, time.thread_time if single else time.perf_counter)
    where = f"kernels {native.isa()}, torch {torch.__version__}, {arguments.elems} float32, {arguments.threads} threads"
    show(found, f"{where}, {'CPU' if single else 'wall'} time, best of {arguments.rounds}")
    if single:
        best = {(entry.what, entry.who): entry.best_s for entry in found}
        for name, what, other, bar in BARS:
            ours = next(best[key] for key in best if key[0] == what and key[1].startswith("hpcps"))
            print(Figure(name=f"codec_{name}", value=best[what, other] / ours, bar=bar).line())


if __name__ == "__main__":
    main()

"""The table that compares runs, as text. It does not print: the caller decides where the text goes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["TableRow", "render_table"]

_HEADS = ("mode", "heterogeneous", "samples/s", "speed-up", "S*", "efficiency", "test AUC", "staleness mean / max")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One run of the table.

    Args:
        mode: sync, async or hybrid.
        heterogeneous: whether shares followed speed.
        samples_per_s: throughput.
        speedup: throughput over that of the baseline; 1 for the baseline itself.
        s_star: ideal speed-up.
        efficiency: ``speedup / s_star``; None for the baseline, which has none.
        test_auc: area under the curve on the test part.
        staleness_mean: in versions.
        staleness_max: in versions.
    """

    mode: str
    heterogeneous: bool
    samples_per_s: float
    speedup: float
    s_star: float
    efficiency: float | None
    test_auc: float
    staleness_mean: float
    staleness_max: float


def render_table(rows: Sequence[TableRow], *, title: str, width: int = 110) -> str:
    """Lay out rows as plain text without colours.

    Args:
        rows: one a run, the baseline first.
        title: one line above the table.
        width: columns of the terminal.
    """
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for index, head in enumerate(_HEADS):
        table.add_column(head, justify="left" if index < 2 else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in _cells(row)))
    text = io.StringIO()
    Console(file=text, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).strip("\n")


def _cells(row: TableRow) -> tuple[str, ...]:
    return (
        row.mode,
        "on" if row.heterogeneous else "off",
        f"{row.samples_per_s:,.0f}",
        f"{row.speedup:.2f}",
        f"{row.s_star:.2f}",
        "baseline" if row.efficiency is None else f"{row.efficiency:.3f}",
        f"{row.test_auc:.3f}",
        f"{row.staleness_mean:.2f} / {row.staleness_max:.0f}",
    )

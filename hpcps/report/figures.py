"""Figures from summaries. The plotter is loaded inside the function, so importing this module stays cheap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcps.errors import DataError, NotBuiltError
from hpcps.report.summary import WorkerTimes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["StepTimesPanel", "draw_step_times"]

_COMPUTE, _WAIT = "#2f6f9f", "#d8dee4"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimesPanel:
    """One panel: a title and the times of each worker, in the order drawn."""

    title: str
    workers: tuple[WorkerTimes, ...]


def draw_step_times(panels: Sequence[StepTimesPanel], path: Path | str, *, title: str) -> Path:
    """Draw what a median step of each worker consists of, one panel a run, all on one scale.

    A bar is compute time, and above it the rest of the step, which is waiting and communication. Balanced shares
    show as bars with an equally high lower part.

    Args:
        panels: at least one, each with at least one worker.
        path: PNG file to write.
        title: one line above the panels.

    Returns:
        The path written.

    Raises:
        DataError: there is nothing to draw.
        NotBuiltError: matplotlib is not installed.
    """
    if not panels or not all(panel.workers for panel in panels):
        raise DataError(
            f"cannot draw step times to {str(path)!r}: got {len(panels)} panels, need some with workers in each;"
            " pass the summary of a run"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotBuiltError(
            f"cannot draw step times to {str(path)!r}: got {error}, need matplotlib; run `pip install matplotlib`"
        ) from error
    figure = Figure(figsize=(1.2 + 2.6 * len(panels), 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(grid, panels, strict=True):
        _draw_panel(axes, panel)
    grid[0].set_ylabel("median step time in ms")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, format="png")
    return Path(path)


def _draw_panel(axes: Axes, panel: StepTimesPanel) -> None:
    places = range(len(panel.workers))
    compute_ms = [1e3 * worker.compute_s for worker in panel.workers]
    rest_ms = [max(0.0, 1e3 * (worker.step_s - worker.compute_s)) for worker in panel.workers]
    axes.bar(places, compute_ms, width=0.7, color=_COMPUTE, label="compute")
    axes.bar(places, rest_ms, width=0.7, bottom=compute_ms, color=_WAIT, label="waiting and communication")
    for place, height in zip(places, compute_ms, strict=True):
        axes.text(place, height / 2, f"{height:.0f}", ha="center", va="center", fontsize=9, color="white")
    axes.set_title(panel.title, fontsize=10)
    axes.set_xticks(places, [f"rank {worker.rank}\n{worker.num_samples:.0f}" for worker in panel.workers], fontsize=8)
    axes.set_xlabel("worker, with its samples a step", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)

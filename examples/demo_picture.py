"""The picture of the demo: the losses of all phases over those of the uninterrupted run, and their difference."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#e69f00", "#009e73")
KILL, GREY = "#c1121f", "#b8bcc2"
SHADE = 0.07


@dataclass(frozen=True, slots=True)
class Curve:
    """The losses of one phase by step."""

    ranks: int
    losses: dict[int, float]
    killed: bool


def draw(path: Path, reference: dict[int, float], curves: list[Curve]) -> None:
    """Write the picture."""
    settings = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(9, 6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
        _draw_losses(top, reference, curves)
        _draw_differences(bottom, reference, curves)
        for axes in (top, bottom):
            _mark(axes, curves)
        figure.align_ylabels()
        figure.savefig(path, dpi=150)


def _draw_losses(axes: Axes, reference: dict[int, float], curves: list[Curve]) -> None:
    axes.plot(list(reference), list(reference.values()), color=GREY, linewidth=6, label="uninterrupted, 4 ranks")
    for curve, colour in zip(curves, COLOURS, strict=True):
        steps, losses = list(curve.losses), list(curve.losses.values())
        start = "started" if steps[0] == 1 else "resumed"
        label = f"{start} on {curve.ranks} ranks"
        axes.plot(steps, losses, "-o", markevery=[0], color=colour, linewidth=1.8, label=label)
        if curve.killed:
            axes.plot(steps[-1], losses[-1], "X", color=KILL, markersize=10, markeredgecolor="white", zorder=6)
    axes.plot([], [], "X", color=KILL, markersize=9, linestyle="none", label="killed in the middle of a save")
    axes.fill_between([], [], color=KILL, alpha=SHADE, linewidth=0, label="lost with the kill, done again")
    axes.set_ylabel("loss")
    axes.set_title("Killed twice, resumed on other numbers of ranks: the same training", loc="left", fontweight="bold")
    axes.legend(frameon=False, loc="upper right")


def _draw_differences(axes: Axes, reference: dict[int, float], curves: list[Curve]) -> None:
    for curve, colour in zip(curves, COLOURS, strict=True):
        apart = [abs(loss - reference[step]) / reference[step] for step, loss in curve.losses.items()]
        axes.plot(list(curve.losses), apart, ".-", color=colour, linewidth=1, markersize=4)
    axes.margins(y=0.1)
    axes.set_ylabel("relative difference\nto uninterrupted")
    axes.set_xlabel("step")


def _mark(axes: Axes, curves: list[Curve]) -> None:
    """Shade the steps that were lost with a kill and done again."""
    for before, after in itertools.pairwise(curves):
        axes.axvspan(min(after.losses) - 1, max(before.losses), color=KILL, alpha=SHADE, linewidth=0)
        axes.axvline(max(before.losses), color=KILL, linewidth=0.8, linestyle=":")

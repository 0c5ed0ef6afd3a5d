"""The chart of `bench prefetch`: how much of the misses each predictor foresees, and what it reads for nothing."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final

from tierd.errors import UsageError
from tierd.extras import install_hint

__all__ = ["draw_recall"]

_COLUMNS: Final = 3
_MOST_WASTE: Final = 3.0


def draw_recall(path: Path, report: dict[str, Any]) -> None:
    """Writes a PNG file: all layers together, then each layer by itself.

    Args:
        path: of the file.
        report: of `measure_recall`.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        figure_module: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise UsageError("--plot needs matplotlib", hint=install_hint("bench")) from None
    panels = {"all layers behind the first": report["curves"]} | {
        f"layer {layer}": curves for layer, curves in report["curves_by_layer"].items()
    }
    names = list(report["curves"])
    rows = -(-len(panels) // _COLUMNS)
    figure = figure_module.Figure(figsize=(4 * _COLUMNS, 3.2 * rows), layout="constrained")
    for number, (title, curves) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(rows, _COLUMNS, number)
        for name, points in curves.items():
            recall, waste = zip(*points, strict=True)
            axes.plot(
                waste, recall, label=name, color=f"C{names.index(name)}", linewidth=2.2 if name == names[0] else 1
            )
        if number == 1:
            axes.plot(
                report["baseline_wasted_per_useful_byte"], report["baseline_recall_on_misses"],
                marker="x", markersize=8, linestyle="none", color="black", label="plain next router",
            )  # fmt: skip
            axes.legend(fontsize="x-small", loc="lower right")
        axes.set_title(title, fontsize="small")
        axes.set(xlabel="wasted bytes per useful byte", ylabel="recall on misses")
        axes.set_xlim(0, _MOST_WASTE)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise UsageError(f"--plot {path}: cannot be written: {error.strerror}") from None

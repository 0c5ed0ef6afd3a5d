"""The chart of a replay: hit rate against arena size, one line per policy."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from tierd.errors import UsageError
from tierd.extras import install_hint
from tierd.policy.belady import Belady
from tierd.policy.contest import Score
from tierd.policy.policies import DEFAULT_POLICY

__all__ = ["draw_chart"]


def draw_chart(path: Path, scores: list[Score], *, title: str) -> None:
    """Writes a PNG file.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        figure_module: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise UsageError("--plot needs matplotlib", hint=install_hint("bench")) from None
    figure = figure_module.Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.add_subplot()
    for name in dict.fromkeys(score.policy for score in scores):
        points = sorted((score.percent, 100 * score.total.hit_rate) for score in scores if score.policy == name)
        style: dict[str, Any] = {"linewidth": 1.2, "alpha": 0.8}
        if name == DEFAULT_POLICY:
            style = {"linewidth": 2.6}
        elif name == Belady.name:
            style = {"linewidth": 1.4, "linestyle": "--", "color": "black"}
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, **style)
    axes.set(title=title, xlabel="arena, % of all experts", ylabel="hit rate, %")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, format="png", dpi=130)
    except OSError as error:
        raise UsageError(f"--plot {path}: cannot be written: {error.strerror}") from None

"""The figures behind `tierd plan`: what fits into how much memory, and what a trace says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tierd.commands.plan_speed import Lacking, MeasuredRun, NodeSpeed, fit_speed
from tierd.errors import UsageError
from tierd.policy.policies import DEFAULT_POLICY, make_policy
from tierd.policy.replay import ReplayArena, replay
from tierd.policy.token_table import TokenTable
from tierd.policy.trace import Trace
from tierd.service.budget import DaemonFacts, fixed_items
from tierd.store.geometry import Geometry

__all__ = ["DriveSpeed", "Prediction", "RamRow", "format_figures", "predict", "ram_rows"]

_GIB = 1 << 30
_SIZES = tuple(size * _GIB for size in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024))


@dataclass(frozen=True, slots=True)
class RamRow:
    """One line of the table.

    Attributes:
        ram: bytes of the whole daemon.
        slots: experts that fit.
        share: of all experts.
        hit_rate: of a replayed trace; None without one.
        read_bytes: that a token of the trace reads from drives, on average.
        tokens_per_second: of one sequence, by the drives and by measured runs of a node; without such runs, what the
            drives alone allow, with nothing else taking time.
        tokens_per_second_with_another_drive: the same with one more drive like those there are.
    """

    ram: int
    slots: int
    share: float
    hit_rate: float | None = None
    read_bytes: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_with_another_drive: float | None = None


@dataclass(frozen=True, slots=True)
class DriveSpeed:
    """The drives that were measured: how many, and their bytes per second together."""

    drives: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Rows with what a trace says of them, and the node's speed, where runs of it were given."""

    rows: list[RamRow]
    node: NodeSpeed | None


def ram_rows(facts: DaemonFacts, wanted: Sequence[int] = ()) -> list[RamRow]:
    """What round sizes hold, from the first that works to the first that holds everything, `wanted` among them."""
    fixed = sum(item.nbytes for item in fixed_items(facts))
    least = fixed + facts.top_k * facts.slot_bytes
    whole = fixed + facts.experts * facts.slot_bytes
    # Small stores have no round size of their own between nothing and everything.
    parts = [fixed + int(facts.experts * part) * facts.slot_bytes for part in (0.1, 0.25, 0.5)]
    sizes = {size for size in (*_SIZES, *wanted, *(parts if whole < 4 * _GIB else ())) if least <= size < whole}
    rows = []
    for ram in (*sorted(sizes), whole):
        slots = min((ram - fixed) // facts.slot_bytes, facts.experts)
        rows.append(RamRow(ram, slots, slots / facts.experts))
    return rows


def predict(
    rows: Sequence[RamRow], trace: Trace, geometry: Geometry, *, speed: DriveSpeed | None, runs: Sequence[MeasuredRun]
) -> Prediction:
    """The same rows with what the daemon's default policy would have made of a trace.

    Args:
        rows: sizes.
        trace: routing of this model.
        geometry: of the store.
        speed: of the drives; None: not measured.
        runs: of a node on this store; the more alike to the trace their text is, the better.

    Raises:
        UsageError: the trace is of another model, or has no decode step to go with the runs.
    """
    if trace.layers != tuple(entry.layer for entry in geometry.layers) or trace.layer_experts != tuple(
        entry.experts for entry in geometry.layers
    ):
        raise UsageError(
            f"--trace {trace.name}: its layers and experts are not those of the model",
            hint="Record one with this model: compute-node generate STORE --trace FILE.",
        )
    sizes = [row.slots for row in rows] + [run.slots for run in runs]
    arenas = [ReplayArena(make_policy(DEFAULT_POLICY), min(slots, geometry.experts_total)) for slots in sizes]
    replay(trace, arenas, table=TokenTable(trace.layer_experts))
    mean = geometry.expert_bytes / geometry.experts_total
    steps = np.unique(trace.steps[~trace.prefill]).size
    node = None
    if runs:
        if speed is None:
            raise UsageError("--measured goes with a store on a drive whose speed can be measured")
        if not steps:
            raise UsageError(f"--trace {trace.name}: has no decode step", hint="Record a longer answer.")
        lacking = [Lacking(steps, arena.lacking) for arena in arenas[len(rows) :]]
        node = fit_speed(runs, lacking, mean * speed.drives / speed.bandwidth, speed.drives)
    predicted = []
    for row, arena in zip(rows, arenas, strict=False):
        read = arena.total.misses * mean / max(1, len(trace))
        rates: tuple[float | None, float | None] = (None, None)
        if speed is not None:
            rates = _rates(node, Lacking(steps, arena.lacking), speed, mean) if node else _bounds(speed, read)
        predicted.append(
            replace(
                row,
                hit_rate=arena.total.hit_rate,
                read_bytes=read,
                tokens_per_second=rates[0],
                tokens_per_second_with_another_drive=rates[1],
            )
        )
    return Prediction(predicted, node)


def _rates(node: NodeSpeed, lacking: Lacking, speed: DriveSpeed, mean: float) -> tuple[float, float]:
    read_seconds = mean * speed.drives / speed.bandwidth
    now = node.step_seconds(lacking, read_seconds, speed.drives)
    return 1 / now, 1 / node.step_seconds(lacking, read_seconds, speed.drives + 1)


def _bounds(speed: DriveSpeed, read: float) -> tuple[float | None, float | None]:
    if not read:
        return None, None
    return speed.bandwidth / read, speed.bandwidth * (speed.drives + 1) / speed.drives / read


def format_figures(geometry: Geometry) -> dict[str, Any]:
    """What follows from geometry and record layout alone, in bytes."""
    slot = geometry.slot_bytes
    return {
        "expert_bytes": geometry.expert_bytes,
        "slot_bytes": slot,
        "wasted_bytes": geometry.experts_total * slot - geometry.expert_bytes,
        "token_bytes": sum(geometry.top_k * geometry.layout(entry.layer).record_bytes for entry in geometry.layers),
    }

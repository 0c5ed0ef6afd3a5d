"""The figures behind `tierd plan`: what fits into how much memory, and what a trace says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierd.errors import UsageError
from tierd.policy.policies import DEFAULT_POLICY, make_policy
from tierd.policy.replay import ReplayArena, replay
from tierd.policy.token_table import TokenTable
from tierd.policy.trace import Trace
from tierd.service.budget import DaemonFacts, fixed_items
from tierd.store.geometry import Geometry

__all__ = ["RamRow", "format_figures", "predict", "ram_rows"]

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
        tokens_per_second: that drives of the measured bandwidth allow, with nothing else taking time.
    """

    ram: int
    slots: int
    share: float
    hit_rate: float | None = None
    read_bytes: float | None = None
    tokens_per_second: float | None = None


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


def predict(rows: Sequence[RamRow], trace: Trace, geometry: Geometry, *, bandwidth: float | None) -> list[RamRow]:
    """The same rows with what the daemon's default policy would have made of a trace.

    Args:
        rows: sizes.
        trace: routing of this model.
        geometry: of the store.
        bandwidth: bytes per second of all drives together.

    Raises:
        UsageError: the trace is of another model.
    """
    if trace.layers != tuple(entry.layer for entry in geometry.layers) or trace.layer_experts != tuple(
        entry.experts for entry in geometry.layers
    ):
        raise UsageError(
            f"--trace {trace.name}: its layers and experts are not those of the model",
            hint="Record one with this model: compute-node generate STORE --trace FILE.",
        )
    arenas = [ReplayArena(make_policy(DEFAULT_POLICY), row.slots) for row in rows]
    replay(trace, arenas, table=TokenTable(trace.layer_experts))
    mean = geometry.expert_bytes / geometry.experts_total
    predicted = []
    for row, arena in zip(rows, arenas, strict=True):
        read = arena.total.misses * mean / max(1, len(trace))
        speed = bandwidth / read if bandwidth and read else None
        predicted.append(replace(row, hit_rate=arena.total.hit_rate, read_bytes=read, tokens_per_second=speed))
    return predicted


def format_figures(geometry: Geometry) -> dict[str, Any]:
    """What follows from geometry and record layout alone, in bytes."""
    slot = geometry.slot_bytes
    return {
        "expert_bytes": geometry.expert_bytes,
        "slot_bytes": slot,
        "wasted_bytes": geometry.experts_total * slot - geometry.expert_bytes,
        "token_bytes": sum(geometry.top_k * geometry.layout(entry.layer).record_bytes for entry in geometry.layers),
    }

"""Which kind of hints a node sends, by the option `--prefetch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from compute_node.kernels import Segment
from compute_node.models.look_ahead import LookAhead
from compute_node.prediction.hinting import Hinting, StepHints
from compute_node.prediction.saying import Saying
from tierd.client.source import ExpertSource
from tierd.errors import UsageError
from tierd.policy.token_table import TokenTable
from tierd.prefetch.throttle import Throttle
from tierd.store.geometry import Geometry

__all__ = ["PREFETCH", "step_hints"]

PREFETCH: Final = ("auto", "on", "tokens", "off")
"""What is sent: hints as far as they make steps faster, hints always, the tokens of steps, or nothing."""


def step_hints(
    prefetch: str,
    source: ExpertSource,
    geometry: Geometry,
    look: LookAhead,
    run: Callable[[Segment], object],
    table: TokenTable,
) -> StepHints | None:
    """What a model tells of its steps; None where nothing is sent, or nobody listens.

    Args:
        prefetch: one of `PREFETCH`.
        source: hears the hints.
        geometry: of the store.
        look: routers of layers to come.
        run: runs a segment.
        table: counts of experts by token.

    Raises:
        UsageError: an unknown kind.
    """
    if prefetch not in PREFETCH:
        raise UsageError(f"unknown prefetch {prefetch!r}", hint=f"Known: {', '.join(PREFETCH)}.")
    if prefetch == "off" or source.step_memory is None:
        return None
    if prefetch == "tokens":
        return Saying(source)
    return Hinting(source, geometry, look, run, table, Throttle(fixed=prefetch == "on"))

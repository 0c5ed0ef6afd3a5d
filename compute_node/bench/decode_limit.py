"""How fast the turns of `bench decode` could have been: bytes that had to move, divided by bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["decode_limit", "delivered_bytes"]


def delivered_bytes(turn: Mapping[str, Any], record_bytes: int) -> int:
    """What a drive had to deliver in a turn: what missed, what joined a read, and what was read ahead and used."""
    outcomes = turn["outcomes"]
    return int(record_bytes * (outcomes["miss"] + outcomes["joined"]) + turn["prefetched_bytes_used"])


def decode_limit(
    turns: Sequence[Mapping[str, Any]], *, tokens: int, record_bytes: int, bytes_per_token: int, memory: float
) -> dict[str, Any]:
    """The limit of the turns, and the share of it that they reached; medians over turns.

    Memory and drive may work at the same time, so the longer of both decides, as in `compute_node.engine.limit`.

    Args:
        turns: as `measure_decode` gives them: seconds, outcomes, prefetched bytes that were used, the drive's probe.
        tokens: of one turn.
        record_bytes: that the drive delivers of an expert.
        bytes_per_token: of weights, all of which a token's step reads from memory.
        memory: bytes per second of plain reading.

    Returns:
        `limit_tokens_per_second`, `limit_share`, and `limit_by`, which of the two decided in most turns.
    """
    in_memory = tokens * bytes_per_token / memory
    on_drive = np.array([delivered_bytes(turn, record_bytes) / turn["probe_bytes_per_second"] for turn in turns])
    least = np.maximum(on_drive, in_memory)
    return {
        "limit_tokens_per_second": float(tokens / np.median(least)),
        "limit_share": float(np.median(least / np.array([turn["seconds"] for turn in turns]))),
        "limit_by": "drive" if np.median(on_drive) > in_memory else "memory",
    }

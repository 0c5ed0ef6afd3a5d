"""Which resource bounds decoding? From where the time of the steps went. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["ADVICE", "limit_of"]

_NEAR_MEMORY: Final = 0.6
"""Of plain reading: a step that moves its weights so fast is bounded by memory, a slower one by computing."""

ADVICE: Final = {
    "drive": "more RAM for experts, a mirror on another drive, or a faster drive would help; more cores would not",
    "memory": "faster memory or smaller weights would help; a faster drive would not",
    "compute": "more or faster cores would help; a faster drive would not",
    "messages": "the way between node and daemon costs most; fewer sessions or more RAM for experts would help",
}
"""By resource, what to do about it."""


def limit_of(facts: Mapping[str, Any]) -> str:
    """The resource, a key of `ADVICE`.

    Args:
        facts: of a trial: `compute_seconds`, `wait_seconds` and, of these, `message_seconds`; `memory_seconds`, the
            time in which plain reading would have moved the same weights.
    """
    compute, messages = float(facts["compute_seconds"]), float(facts["message_seconds"])
    drive = float(facts["wait_seconds"]) - messages
    if drive > max(compute, messages):
        return "drive"
    if messages > compute:
        return "messages"
    return "memory" if float(facts["memory_seconds"]) >= _NEAR_MEMORY * compute else "compute"

"""What a node says of experts that it will probably want: one message, and nothing to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierd.api import session_pb2 as pb
from tierd.arena.attach import Attachment

__all__ = ["Absent", "absent_experts", "hint_message"]

Absent: TypeAlias = NDArray[np.bool_]
"""By expert of a layer, whether it is not in RAM."""

_MOST_LEAD_SECONDS = 60.0


def absent_experts(memory: Attachment, first: int, experts: int) -> Absent:
    """Which experts of a layer are not in the arena now: bool [experts].

    Args:
        memory: the attachment.
        first: flat number of the layer's expert 0.
        experts: how many the layer has.
    """
    # `ABSENT` is 0, and to compare with a number takes longer: caches are cold where this is asked.
    absent: Absent = np.logical_not(memory.table.words[first : first + experts])
    return absent


def hint_message(
    layer: int, experts: Sequence[int], probabilities: Sequence[float], *, step: int, lead_seconds: float
) -> pb.OpenSessionRequest:
    """The message that says these experts of the layer will probably be wanted."""
    lead = round(min(max(lead_seconds, 0.0), _MOST_LEAD_SECONDS) * 1e6)
    hint = pb.Hint(step=step, layer=layer, experts=experts, probabilities=probabilities, lead_us=lead)
    return pb.OpenSessionRequest(hint=hint)

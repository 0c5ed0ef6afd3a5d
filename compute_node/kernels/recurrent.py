"""How the rows of a step meet the recurrent states of their sequences.

A state has two copies for each sequence. The first row of a sequence reads copy `states_in`, its last row leaves copy
`states_out` behind, and the engine changes their roles only after a step that succeeded: a step that was given up has
changed nothing. A sequence that begins (position 0) has a state of zeros, whatever its copy holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from compute_node.kernels.lanes import i64_at
from compute_node.kernels.op import check_buffer
from tierd.errors import UsageError

__all__ = ["begins", "check_state", "holds"]


@njit(nogil=True, cache=True, error_model="numpy")
def begins(states_out: int, row: int) -> Any:
    """True if the row is the first one of its sequence in this step; rows of a sequence follow each other."""
    copies = i64_at(states_out)
    return row == 0 or copies[row] != copies[row - 1]


@njit(nogil=True, cache=True, error_model="numpy")
def holds(states_in: int, states_out: int, row: int, copies: int) -> Any:
    """True if both copies of a row's state exist."""
    read, written = i64_at(states_in)[row], i64_at(states_out)[row]
    return 0 <= read < copies and 0 <= written < copies


def check_state(name: str, state: NDArray[np.float32], shape: tuple[int, ...]) -> None:
    """UsageError unless `state` is contiguous float32 [copies, *shape] with at least two copies."""
    check_buffer(name, "state", state, (2, *shape), writable=True)
    if not state.flags.c_contiguous:
        raise UsageError(f"{name}: the copies of a state must be contiguous")

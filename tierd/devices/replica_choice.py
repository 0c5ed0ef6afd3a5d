"""Which copy of a record to read: the one that is predicted to be there first. No clock and no I/O.

Among copies within a tenth of the best, a weighted hash of the flat expert number decides (rendezvous hashing with
weights, Schindelhauer and Schomaker 2005), so that any set of hot experts, however its numbers are chosen, spreads
over the drives by their bandwidth. A slow drive is chosen only when it would be no later than the fast ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Replica", "choose", "spread"]

_NEAR: Final = 1.1
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Replica:
    """One drive that holds the record.

    Attributes:
        key: 64-bit number of the drive that stays the same over restarts.
        bandwidth: bytes per second, above 0.
        seconds: predicted until the record would be there: (bytes queued + its own) / bandwidth + recent latency.
    """

    key: int
    bandwidth: float
    seconds: float


def choose(expert: int, replicas: Sequence[Replica]) -> int:
    """Position of the replica to read.

    Args:
        expert: flat expert number.
        replicas: at least one, in any order; the choice does not depend on it.
    """
    if len(replicas) == 1:
        return 0
    bound = _NEAR * min(replica.seconds for replica in replicas)
    near = [place for place, replica in enumerate(replicas) if replica.seconds <= bound]
    return max(near, key=lambda place: spread(expert, replicas[place].key, replicas[place].bandwidth))


def spread(expert: int, key: int, weight: float) -> float:
    """The drive's claim to an expert; over many experts the greatest claim falls to drives in proportion to weight."""
    uniform = (_mix(_mix(expert + 0x9E3779B97F4A7C15) ^ key) + 1) / (_MASK + 2)
    return -weight / math.log(uniform)


def _mix(value: int) -> int:
    """The finaliser of splitmix64: every bit of the number decides every bit of the result."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)

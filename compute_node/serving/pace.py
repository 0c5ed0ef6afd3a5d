"""How long a client should wait before it asks again."""

from __future__ import annotations

from typing import Final

__all__ = ["Pace"]

_SMOOTHING: Final = 1 / 8
_MOST_SECONDS: Final = 600.0


class Pace:
    """Learns how long requests run.

    Args:
        places: how many run at once.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._seconds = 0.0

    def ended(self, seconds: float) -> None:
        """A request is over that has run so long."""
        self._seconds += (seconds - self._seconds) * (_SMOOTHING if self._seconds else 1.0)

    @property
    def seconds_until_a_place(self) -> float:
        """Until one of the running requests has probably ended, and one has left the queue; at most ten minutes."""
        return min(_MOST_SECONDS, self._seconds / self._places)

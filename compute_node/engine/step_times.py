"""Where the time of a model's steps goes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepTimes"]


@dataclass(slots=True)
class StepTimes:
    """Where the time of all steps went, in seconds: `seconds` = computing + waiting for experts."""

    seconds: float = 0.0
    wait_seconds: float = 0.0
    steps: int = 0

    @property
    def compute_seconds(self) -> float:
        """Time in steps that was not spent waiting for experts."""
        return max(0.0, self.seconds - self.wait_seconds)

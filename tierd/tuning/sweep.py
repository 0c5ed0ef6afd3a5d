"""The order of trials, and who wins: one setting after the other, and only by more than the noise. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tierd.sizes import format_share

__all__ = ["Choice", "Outcome", "Result", "Settings", "noise", "sweep"]

Settings = Mapping[str, Any]
"""By `serve.NAME` or `node.NAME`; what is not named has its default."""

_LEAST_NOISE: Final = 0.03


@dataclass(frozen=True, slots=True)
class Choice:
    """One thing that the machine leaves open.

    Attributes:
        name: for people.
        candidates: settings to try in place of what holds.
    """

    name: str
    candidates: tuple[Settings, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one trial showed.

    Attributes:
        settings: under which it ran.
        seconds: per token, one number for each run.
        digest: of all logits; the same for all settings, or something is broken.
        facts: where the time went, and what the daemon and the node said of themselves.
    """

    settings: Settings
    seconds: tuple[float, ...]
    digest: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Seconds per token."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class Result:
    """How a sweep ended.

    Attributes:
        settings: that won.
        outcome: the last trial of these.
        default: the first trial of the settings that were there before.
        steps: for people: each choice, what was tried and what came of it.
    """

    settings: Settings
    outcome: Outcome
    default: Outcome
    steps: tuple[str, ...]


def noise(*outcomes: Outcome) -> float:
    """How far runs of the same settings lie apart: the distance of their quartiles, as a share of their median."""
    seconds = sorted(value for outcome in outcomes for value in outcome.seconds)
    if len(seconds) < 2:
        return _LEAST_NOISE
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return max(_LEAST_NOISE, (high - low) / statistics.median(seconds))


def sweep(
    start: Settings, choices: Callable[[Outcome], Sequence[Choice]], measure: Callable[[Settings], Outcome]
) -> Result:
    """Try each choice by itself, beginning with the settings that hold.

    What holds is measured before and after its rivals, so that a drift of the machine does not look like a gain; and a
    rival that is faster is measured again before it is believed.

    Args:
        start: settings to begin with.
        choices: what there is to try, as the first trial shows it.
        measure: makes a trial; its exceptions end the sweep.
    """
    best = default = measure(start)
    steps = []
    for choice in choices(default):
        tried = [measure({**best.settings, **candidate}) for candidate in choice.candidates]
        again = measure(best.settings)
        rival = min(tried, key=lambda outcome: outcome.median, default=again)
        spread = noise(best, again)
        held = statistics.median([*best.seconds, *again.seconds])
        won = rival.median < held * (1 - spread)
        if won:
            # The best of several is often lucky: it must do it again.
            rival = measure(rival.settings)
            won = rival.median < held * (1 - spread)
        gain = held / rival.median - 1
        change = ", ".join(
            f"{name}={value}" for name, value in rival.settings.items() if best.settings.get(name) != value
        )
        verdict = "taken" if won else "not more than the noise"
        sizes = f"{100 * gain:+.1f} % tokens/s (noise {format_share(spread, digits=1)})"
        steps.append(f"{choice.name}: best is {change}, {sizes}: {verdict}")
        best = rival if won else again
    return Result(best.settings, best, default, tuple(steps))

"""Trials that were made, so that a sweep that was stopped goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tierd.store.writing import write_atomic
from tierd.tuning.sweep import Outcome, Settings

__all__ = ["Journal"]

_FORMAT: Final = 1


class Journal:
    """Outcomes in the order in which they were had; the file is written anew after each.

    Args:
        path: of the file. One that is damaged, or of another sweep, counts as none.
        sweep: facts that say which sweep it is: machine, store, trace, sizes.
    """

    def __init__(self, path: Path, sweep: Mapping[str, Any]) -> None:
        self.path = path
        self._sweep = dict(sweep)
        self._outcomes = self._load()
        self._next = 0

    def __len__(self) -> int:
        return len(self._outcomes)

    def recall(self, settings: Settings) -> Outcome | None:
        """The next trial if it has been made already; a sweep asks for trials in the same order each time."""
        if self._next < len(self._outcomes) and self._outcomes[self._next].settings == dict(settings):
            self._next += 1
            return self._outcomes[self._next - 1]
        del self._outcomes[self._next :]
        return None

    def add(self, outcome: Outcome) -> None:
        """A trial has been made; DriveError or OSError if that cannot be written down."""
        self._outcomes.append(outcome)
        self._next = len(self._outcomes)
        rows = [
            {"settings": dict(o.settings), "seconds": o.seconds, "digest": o.digest, "facts": dict(o.facts)}
            for o in self._outcomes
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": _FORMAT, "sweep": self._sweep, "trials": rows}
        write_atomic(self.path, json.dumps(content).encode())

    def forget(self) -> None:
        """The sweep is finished, or is to begin anew."""
        self._outcomes.clear()
        self._next = 0
        self.path.unlink(missing_ok=True)

    def _load(self) -> list[Outcome]:
        try:
            content = json.loads(self.path.read_bytes())
            if (content["format"], content["sweep"]) != (_FORMAT, json.loads(json.dumps(self._sweep))):
                return []
            return [
                Outcome(dict(row["settings"]), tuple(map(float, row["seconds"])), str(row["digest"]), row["facts"])
                for row in content["trials"]
            ]
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return []

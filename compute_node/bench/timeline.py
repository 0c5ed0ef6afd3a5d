"""Where a node's time goes, event by event: computing, waiting, looking ahead; beside it what its daemon read.

Written as a Chrome trace for https://ui.perfetto.dev. The clock is the machine's monotonic one, as the daemon's flight
recorder has it, so that both stand on one line of time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierd.client.source import DirectAccess, ExpertSource, Phase, SourceStats, StepMemory, StoreView, Use
from tierd.errors import UsageError

__all__ = ["TimedSource", "Timeline"]

_MOST_EVENTS: Final = 200_000
_LEAST_WAIT: Final = 20e-6
"""Shorter pauses between two pieces of work are Python, and no waits."""
_NODE: Final = 2
"""Process number of the node in the trace; the daemon's is 1."""


class Timeline:
    """A list of spans, the first `_MOST_EVENTS` of a run.

    Attributes:
        clock: seconds on the monotonic clock.
    """

    def __init__(self) -> None:
        self.clock = time.monotonic
        self._spans: list[tuple[str, str, float, float]] = []

    def __len__(self) -> int:
        return len(self._spans)

    def span(self, track: str, name: str, begun: float, ended: float) -> None:
        """Something lasted from one moment to another."""
        if len(self._spans) < _MOST_EVENTS:
            self._spans.append((track, name, begun, ended))

    def computed(self, name: str, begun: float, ended: float) -> None:
        """Native code ran; what `Executor.watch` is told."""
        self.span("native code", name, begun, ended)

    def write(self, path: Path, daemon: bytes | None = None) -> None:
        """Writes the trace.

        Args:
            path: of the JSON file.
            daemon: the daemon's dump, whose events are shown as a process of their own.

        Raises:
            UsageError: the file cannot be written.
        """
        tracks = {track: number for number, track in enumerate(dict.fromkeys(s[0] for s in self._spans), start=1)}
        first = min((span[2] for span in self._spans), default=0.0)
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": _NODE, "tid": 0, "name": "process_name", "args": {"name": "compute-node"}},
            *(
                {"ph": "M", "pid": _NODE, "tid": number, "name": "thread_name", "args": {"name": track}}
                for track, number in tracks.items()
            ),
        ]
        if daemon is not None:
            dump = json.loads(daemon)
            now = dump["otherData"]["monotonic_seconds"]
            for event in dump["traceEvents"]:
                if "ts" in event:
                    event["ts"] = round(event["ts"] + (now - first) * 1e6, 1)
                if event.get("ts", 0) >= 0:
                    events.append(event)
        events += [
            {
                "ph": "X", "pid": _NODE, "tid": tracks[track], "name": name,
                "ts": round((begun - first) * 1e6, 1), "dur": round((ended - begun) * 1e6, 1),
            }
            for track, name, begun, ended in self._spans
        ]  # fmt: skip
        try:
            path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--timeline {path}: cannot be written: {error.strerror}") from None


class TimedSource:
    """An expert source that notes what happens in each visit: which experts are computed on, and when nothing is.

    Args:
        source: does the work.
        timeline: takes the spans.
    """

    def __init__(self, source: ExpertSource, timeline: Timeline) -> None:
        self.stats: SourceStats = source.stats
        self._source = source
        self._timeline = timeline

    @property
    def store(self) -> StoreView:
        """Of the source."""
        return self._source.store

    @property
    def direct(self) -> DirectAccess | None:
        """Of the source."""
        return self._source.direct

    @property
    def step_memory(self) -> StepMemory | None:
        """Of the source."""
        return self._source.step_memory

    def absent(self, layer: int) -> NDArray[np.bool_] | None:
        """See `ExpertSource.absent`."""
        return self._source.absent(layer)

    def hint(
        self, layer: int, experts: Sequence[int], probabilities: Sequence[float], *, step: int, lead_seconds: float
    ) -> None:
        """See `ExpertSource.hint`."""
        self._source.hint(layer, experts, probabilities, step=step, lead_seconds=lead_seconds)

    def say_tokens(self, tokens: Sequence[int], *, step: int) -> None:
        """See `ExpertSource.say_tokens`."""
        self._source.say_tokens(tokens, step=step)

    def visit(
        self,
        layer: int,
        experts: Sequence[int],
        use: Use,
        *,
        step: int,
        phase: Phase,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """See `ExpertSource.visit`."""
        timeline, clock = self._timeline, self._timeline.clock
        last = begun = clock()

        def work(track: str, name: str, call: Callable[[], None]) -> None:
            nonlocal last
            start = clock()
            if start - last >= _LEAST_WAIT:
                timeline.span("waits", f"layer {layer}", last, start)
            call()
            last = clock()
            timeline.span(track, name, start, last)

        def timed_use(expert: int, address: int) -> None:
            work("experts", f"layer {layer} expert {expert}", lambda: use(expert, address))

        def timed_meanwhile() -> None:
            assert meanwhile is not None
            work("looking ahead", f"layer {layer}", meanwhile)

        self._source.visit(
            layer, experts, timed_use, step=step, phase=phase, meanwhile=None if meanwhile is None else timed_meanwhile
        )
        timeline.span("visits", f"layer {layer}", begun, clock())

    def close(self) -> None:
        """See `ExpertSource.close`."""
        self._source.close()

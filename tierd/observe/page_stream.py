"""The page's data: one binary stream per viewer, made once for all of them, at a bounded rate.

A stream is a row of frames: kind (uint8), three zero bytes, payload bytes (uint32), payload; all little-endian.

    1 snapshot   uint32 layers; per layer uint32 number and uint32 experts; uint8 place and uint8 heat of each expert
    2 changes    uint32 moved, uint32 used; then as many words flat | place << 24, and flat | min(uses, 255) << 24
    3 heat       uint8 heat of each expert
    4 live       JSON: figures as of now
    5 past       JSON: the last ten minutes in columns
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from enum import IntEnum
from typing import Any, Final

import numpy as np

from tierd.observe.expert_view import ExpertSources, ExpertView

__all__ = ["MOST_VIEWERS", "Frame", "PageStream"]

MOST_VIEWERS: Final = 8
"""Streams at a time; a person needs one."""

_TICK_SECONDS: Final = 0.125
_TICKS_PER_LIVE: Final = 8
_TICKS_PER_HEAT: Final = 16
_MOST_QUEUED: Final = 64
"""Frames that a viewer may be behind, about five seconds; then it gets a new snapshot instead."""

_HEADER: Final = struct.Struct("<B3xI")


class Frame(IntEnum):
    """Kinds of frames."""

    SNAPSHOT = 1
    CHANGES = 2
    HEAT = 3
    LIVE = 4
    PAST = 5


def _frame(kind: Frame, payload: bytes) -> bytes:
    return _HEADER.pack(kind, len(payload)) + payload


def _json(kind: Frame, value: Any) -> bytes:
    return _frame(kind, json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())


class PageStream:
    """Looks while somebody looks on, and passes what changed to every viewer.

    Args:
        layers: number and experts of each layer that has any.
        sources: of the experts' places and uses.
        live: figures as of now, as plain JSON values.
        past: the last ten minutes.

    Attributes:
        looks: how often it looked, over all time; it rests while there is no viewer.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        sources: ExpertSources,
        live: Callable[[], Any],
        past: Callable[[], Any],
    ) -> None:
        self.looks = 0
        self._layers = struct.pack("<I", len(layers)) + b"".join(struct.pack("<II", *layer) for layer in layers)
        self._sources = sources
        self._live = live
        self._past = past
        self._view: ExpertView | None = None
        self._viewers: set[asyncio.Queue[bytes]] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def viewers(self) -> int:
        """Streams that are open."""
        return len(self._viewers)

    @property
    def full(self) -> bool:
        """Whether no further viewer is admitted."""
        return self._closed or len(self._viewers) >= MOST_VIEWERS

    async def frames(self) -> AsyncIterator[bytes]:
        """A new viewer's frames, from a snapshot on; nothing if it is `full`."""
        if self.full:
            return
        queue: asyncio.Queue[bytes] = asyncio.Queue(_MOST_QUEUED)
        self._viewers.add(queue)
        try:
            if self._ticking is None:
                self._view = ExpertView(self._sources)
                self._ticking = asyncio.create_task(self._tick(), name="page-stream")
            queue.put_nowait(self._beginning())
            while data := await queue.get():
                yield data
        finally:
            self._viewers.discard(queue)

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()
        self._end_streams()

    def _end_streams(self) -> None:
        for queue in self._viewers:
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(b"")

    def _beginning(self) -> bytes:
        assert self._view is not None
        places = self._view.places.tobytes()
        snapshot = _frame(Frame.SNAPSHOT, self._layers + places + self._view.heat().tobytes())
        return snapshot + _json(Frame.PAST, self._past()) + _json(Frame.LIVE, self._live())

    async def _tick(self) -> None:
        tick = 0
        try:
            while self._viewers:
                await asyncio.sleep(_TICK_SECONDS)
                tick += 1
                data = self._changes()
                if tick % _TICKS_PER_HEAT == 0:
                    assert self._view is not None
                    data += _frame(Frame.HEAT, self._view.heat().tobytes())
                if tick % _TICKS_PER_LIVE == 0:
                    data += _json(Frame.LIVE, self._live())
                if data:
                    self._pass_on(data)
        finally:
            # After a failed look, too: pages whose stream has ended ask for a new one.
            self._ticking = self._view = None
            self._end_streams()

    def _changes(self) -> bytes:
        assert self._view is not None
        self.looks += 1
        moved = self._view.look(_TICK_SECONDS).astype(np.uint32)
        used = np.flatnonzero(self._view.used).astype(np.uint32)
        if not moved.size and not used.size:
            return b""
        places = moved | self._view.places[moved].astype(np.uint32) << 24
        counts = used | np.minimum(self._view.used[used], 255) << 24
        payload = struct.pack("<II", moved.size, used.size) + places.astype("<u4").tobytes()
        return _frame(Frame.CHANGES, payload + counts.astype("<u4").tobytes())

    def _pass_on(self, data: bytes) -> None:
        fresh = b""
        for queue in self._viewers:
            if queue.full():
                while not queue.empty():
                    queue.get_nowait()
                fresh = fresh or self._beginning()
                queue.put_nowait(fresh)
            else:
                queue.put_nowait(data)

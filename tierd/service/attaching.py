"""Attaching nodes to the arena: a session block for each, and the life line that ends it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tierd.arena.arena import Arena
from tierd.arena.attach_server import AttachServer
from tierd.arena.session_block import SessionBlockReader

__all__ = ["ArenaAttacher"]


class ArenaAttacher:
    """Makes what a node needs for the zero-copy path, and takes it back when the node is gone.

    Silence on the gRPC stream ends a session's queue and grants. Only the end of its life line proves that the process
    is gone and frees its block: a paused node may wake and must still find its memory.
    """

    def __init__(self, path: Path, arena: Arena, experts: int, on_gone: Callable[[int], None]) -> None:
        self.path = str(path)
        self._experts = experts
        self._on_gone = on_gone
        self._server = AttachServer(path, arena.offer(), self._gone)
        self._held: dict[int, tuple[SessionBlockReader, int]] = {}

    async def start(self) -> None:
        """Begin to listen; ArenaError if the socket cannot be made."""
        await self._server.start()

    def offer(self, session_id: int) -> bytes:
        """A token that lets the session's node attach once, within a few seconds."""
        block = SessionBlockReader.create(self._experts)
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._held[session_id] = (block, event)
        return self._server.offer(session_id, block_fd=block.fd, event_fd=event)

    def attached(self, session_id: int) -> bool:
        """Whether the session's node holds the arena's descriptors now."""
        return self._server.attached(session_id)

    def left(self, session_id: int) -> None:
        """The session's stream ended. If the node never attached, nothing is left of it; else its life line decides."""
        if not self._server.attached(session_id):
            self._server.end(session_id)
            self._free(session_id)

    async def close(self) -> None:
        """Close the socket and every life line."""
        await self._server.close()
        for session_id in list(self._held):
            self._free(session_id)

    def _gone(self, session_id: int) -> None:
        self._free(session_id)
        self._on_gone(session_id)

    def _free(self, session_id: int) -> None:
        held = self._held.pop(session_id, None)
        if held is not None:
            block, event = held
            block.close()
            os.close(event)

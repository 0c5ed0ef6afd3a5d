"""Attaching nodes to the arena: a session block for each, and the life line that ends it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierd.arena.arena import Arena
from tierd.arena.attach_server import AttachServer
from tierd.arena.session_block import NewUse, SessionBlockReader
from tierd.service.message_socket import MessageSocket

__all__ = ["ArenaAttacher"]

# Nodes that ended since the policy was told last: what older ones used is history.
_MOST_ENDED = 64

# A look at a block of 20,000 experts takes 40 us of the loop. Who asks in each layer need not pay for all others each
# time: what they do within a step is seen with their next step, or after so many requests.
_MOST_LEFT_OUT = 15


@dataclass(slots=True)
class _Look:
    """The step that a session was in when its block was looked at last, and how often it was left out since."""

    step: int = -1
    left_out: int = 0


class ArenaAttacher:
    """Makes what a node needs for the zero-copy path, and takes it back when the node is gone.

    Silence on the gRPC stream ends a session's queue and grants. Only the end of its life line proves that the process
    is gone and frees its block: a paused node may wake and must still find its memory. It is read a last time then.

    Attributes:
        path: the attach socket.
        unasked_reads: nodes may read residents without asking, since the kernel offers the writer's fence.
    """

    def __init__(self, path: Path, arena: Arena, experts: int, on_gone: Callable[[int], None]) -> None:
        self.path = str(path)
        self.unasked_reads = arena.fenced
        self._experts = experts
        self._on_gone = on_gone
        self._server = AttachServer(path, arena.offer(), self._gone)
        self._held: dict[int, tuple[SessionBlockReader, MessageSocket]] = {}
        self._looks: dict[int, _Look] = {}
        self._ended_counts: list[tuple[int, int, int]] = []
        self._ended_uses: deque[tuple[int, list[NewUse]]] = deque(maxlen=_MOST_ENDED)

    async def start(self) -> None:
        """Begin to listen; ArenaError if the socket cannot be made."""
        await self._server.start()

    def offer(self, session_id: int) -> bytes:
        """A token that lets the session's node attach once, within a few seconds."""
        block = SessionBlockReader.create(self._experts)
        messages = MessageSocket()
        self._held[session_id] = (block, messages)
        self._looks[session_id] = _Look()
        return self._server.offer(session_id, block_fd=block.fd, message_fd=messages.node_fd)

    def messages(self, session_id: int) -> MessageSocket:
        """The socket for messages of a session that was offered something."""
        return self._held[session_id][1]

    def attached(self, session_id: int) -> bool:
        """Whether the session's node holds the arena's descriptors now."""
        return self._server.attached(session_id)

    def counts(self) -> Iterator[tuple[int, int, int]]:
        """See `SessionMemory.counts`."""
        ended, self._ended_counts = self._ended_counts, []
        yield from ended
        for session_id, (block, _) in self._held.items():
            prefill, decode = block.count_uses()
            if prefill or decode:
                yield session_id, prefill, decode

    def new_uses(self, asking: int | None) -> Iterator[tuple[int, list[NewUse]]]:
        """See `SessionMemory.new_uses`."""
        while self._ended_uses:
            yield self._ended_uses.popleft()
        for session_id, (block, _) in self._held.items():
            look, step = self._looks[session_id], block.step()
            if asking not in (None, session_id) and step == look.step and look.left_out < _MOST_LEFT_OUT:
                look.left_out += 1
                continue
            look.step, look.left_out = step, 0
            new = block.take_uses()
            if new:
                yield session_id, new

    def in_use(self, flat: int) -> bool:
        """See `SessionMemory.in_use`."""
        for block, _ in self._held.values():  # noqa: SIM110 - asked for each expert that could leave, in a request's way
            if block.in_use(flat):
                return True
        return False

    def steps(self) -> dict[int, int]:
        """The step of each session whose node is attached, as the node says."""
        return {number: block.step() for number, (block, _) in self._held.items() if self._server.attached(number)}

    def uses(self) -> dict[int, NDArray[np.uint32]]:
        """Uses of each expert without a message since the session began, by session: uint32[experts], copies."""
        return {
            number: block.uses().sum(axis=0, dtype=np.uint32)
            for number, (block, _) in self._held.items()
            if self._server.attached(number)
        }

    def expectation(self, session_id: int) -> NDArray[np.uint8] | None:
        """See `SessionMemory.expectation`."""
        held = self._held.get(session_id)
        return held[0].expect() if held is not None else None

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
        self._looks.pop(session_id, None)
        if held is not None:
            block, messages = held
            self._ended_counts.append((session_id, *block.count_uses()))
            self._ended_uses.append((session_id, block.take_uses()))
            block.close()
            messages.close()

"""Experts as bytes for clients without shared memory: granted, copied, released."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from tierd.broker.broker import Broker
from tierd.errors import DataLoss, DeadlineExceeded, DriveError, TierdError
from tierd.requests import AcquireRequest, Granted, Outcome, Phase, Reason, Refused
from tierd.rpc import CHUNK_BYTES

__all__ = ["RecordReader", "RecordSession"]

View: TypeAlias = Callable[[int, int, int], memoryview]

_FIRST_SESSION_ID = 1 << 40
"""Sessions of this kind are numbered apart from the nodes' own."""


class RecordSession:
    """One caller's place at the broker. It holds at most one grant, and only while the bytes are copied."""

    def __init__(self, broker: Broker, session_id: int, view: View) -> None:
        self.id = session_id
        self._broker = broker
        self._view = view
        self._acquires = 0
        self._answer: asyncio.Future[Granted | Refused] | None = None

    def answered(self, acquire_id: int, granted: list[Granted], refused: list[Refused]) -> None:
        """The broker's answer to the one expert asked for."""
        if acquire_id == self._acquires and self._answer is not None and not self._answer.done():
            self._answer.set_result(granted[0] if granted else refused[0])

    async def read(
        self, layer: int, expert: int, deadline: float, *, phase: Phase = Phase.DECODE, repeated: bool = False
    ) -> tuple[bytearray, Outcome]:
        """A copy of the record, and how it was come by.

        It is made a chunk at a time: copying a large record at once would keep the loop for milliseconds.

        Args:
            layer: model layer number.
            expert: expert number in the layer.
            deadline: moment on the loop's clock.
            phase: what kind of step wants it.
            repeated: it was asked for and counted before.

        Raises:
            LimitExceeded: no such layer or expert.
            DataLoss: no good copy exists.
            DriveError: the drive does not answer now.
            DeadlineExceeded: it did not come in time.
        """
        loop = asyncio.get_running_loop()
        self._acquires += 1
        self._answer = loop.create_future()
        seconds = max(0.001, deadline - loop.time())
        request = AcquireRequest(self._acquires, layer, (expert,), phase, seconds, repeated)
        self._broker.acquire(self.id, request)
        answer = await self._answer
        if isinstance(answer, Refused):
            raise _error(answer)
        try:
            nbytes = len(self._view(answer.word, layer, expert))
            record = bytearray(nbytes)
            for start in range(0, nbytes, CHUNK_BYTES):
                end = min(start + CHUNK_BYTES, nbytes)
                record[start:end] = self._view(answer.word, layer, expert)[start:end]
                await asyncio.sleep(0)
            return record, answer.outcome
        finally:
            self._broker.release(self.id, self._acquires)


class RecordReader:
    """Gives each caller a session at the broker for as long as its call lives.

    Args:
        broker: grants the experts.
        view: the bytes behind a granted word of an expert, by word, layer and expert.
    """

    def __init__(self, broker: Broker, view: View) -> None:
        self._broker = broker
        self._view = view
        self._next_id = _FIRST_SESSION_ID

    @contextmanager
    def session(self) -> Iterator[RecordSession]:
        """A session that ends with the block, whatever happens in it."""
        session = RecordSession(self._broker, self._next_id, self._view)
        self._next_id += 1
        self._broker.open_session(session.id, session)
        try:
            yield session
        finally:
            self._broker.close_session(session.id)


def _error(refused: Refused) -> TierdError:
    match refused.reason:
        case Reason.DATA_LOSS:
            return DataLoss(refused.detail)
        case Reason.DEADLINE_EXCEEDED:
            return DeadlineExceeded(refused.detail)
        case _:
            return DriveError(refused.detail)

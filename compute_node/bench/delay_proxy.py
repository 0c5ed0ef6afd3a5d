"""A TCP proxy that is slow on purpose: it stands for a long or sick link, in measurements and in tests.

`python -m compute_node.bench.delay_proxy LISTEN TARGET SECONDS` runs one until its standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from tierd.addresses import Address, parse_address

__all__ = ["DelayProxy"]

_PIECE: Final = 256 << 10
_MOST_PIECES: Final = 256
_CLOSE_SECONDS: Final = 5.0

_Result = TypeVar("_Result")


class DelayProxy:
    """Passes bytes on after a delay, in order, both ways. It has a thread of its own; call its methods from any other.

    Args:
        target: where connections go.
        listen: where they come from; port 0 takes a free one.
        delay: seconds that every piece is held back.

    Attributes:
        address: where it listens.
        delay: may be changed at any moment.
    """

    def __init__(self, target: Address, *, listen: Address | None = None, delay: float = 0.0) -> None:
        self.delay = delay
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="delay-proxy", daemon=True)
        self._thread.start()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False
        self._open: set[asyncio.Task[None]] = set()
        self.address = self._do(self._listen(listen or Address(host="127.0.0.1", port=0)))

    def cut(self, *, refuse: bool = False) -> None:
        """End all connections at once, without a farewell; with `refuse`, take no new ones."""
        self._do(self._cut(refuse))

    def stall(self, stalled: bool = True) -> None:
        """Pass nothing on, and keep all connections; or go on."""
        self._do(self._stall(stalled))

    def close(self) -> None:
        """End everything."""
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        future: Future[_Result] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(_CLOSE_SECONDS)

    async def _listen(self, listen: Address) -> Address:
        self._server = await asyncio.start_server(self._connected, listen.host, listen.port)
        host, port = self._server.sockets[0].getsockname()[:2]
        return Address(host=host, port=port)

    async def _cut(self, refuse: bool) -> None:
        self._refusing = refuse
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _stall(self, stalled: bool) -> None:
        if stalled:
            self._flowing.clear()
        else:
            self._flowing.set()

    async def _close(self) -> None:
        self._server.close()
        await self._cut(refuse=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            with contextlib.suppress(OSError):
                there, back = await asyncio.open_connection(self._target.host, self._target.port)
                writers.append(back)
                both = [asyncio.ensure_future(self._pass(*way)) for way in ((reader, back), (there, writer))]
                try:
                    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in both:
                        way.cancel()
                    await asyncio.gather(*both, return_exceptions=True)
        finally:
            for one in writers:
                one.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction, until its end; pieces leave in the order in which they came, each after the delay."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MOST_PIECES)
        sending = asyncio.ensure_future(self._send(pieces, writer))
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(_PIECE):
                    await pieces.put((self._loop.time() + self.delay, data))
                await pieces.put((self._loop.time() + self.delay, b""))
                await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send(self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = await pieces.get()
                if not data:
                    return
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()


def _main() -> None:
    listen, target, seconds = sys.argv[1:]
    proxy = DelayProxy(
        parse_address(target, option="TARGET"), listen=parse_address(listen, option="LISTEN"), delay=float(seconds)
    )
    print(f"passing {proxy.address} on to {target}", flush=True)
    sys.stdin.read()
    proxy.close()


if __name__ == "__main__":
    _main()

"""The API of a node, served inside the tests' process: real sockets, the real engine on the embedded model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest
from daemons import eventually

from compute_node.commands.api_server import serving
from compute_node.commands.opening import open_store
from compute_node.server.settings import ApiSettings
from compute_node.settings import NodeSettings
from tierd.client.loop_thread import LoopThread

__all__ = ["ServedModel", "served"]


class ServedModel:
    """A server that answers, and ways to reach it that no client library would use."""

    def __init__(self, running):
        self.engine = running.engine
        self.service = running.service
        self.http = running.http
        self.url = running.http.url
        self.port = running.http.address.port

    def idle(self):
        """Wait until every request has ended and every page is free again."""

        def free():
            stats = self.engine.stats()
            everyone_is_answered = sum(stats.finished.values()) == stats.requests
            return everyone_is_answered and stats.running == stats.waiting == 0 and stats.pages == stats.free_pages

        eventually(free)

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def send(self, path, body, *, headers=()):
        """A connection on which a request has been sent; its answer has not been read."""
        content = json.dumps(body).encode() if not isinstance(body, bytes) else body
        head = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", "Content-Type: application/json"]
        head += [f"Content-Length: {len(content)}", *headers]
        connection = self.connect()
        connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + content)
        return connection


@contextlib.contextmanager
def served(store, *, node=None, **api):
    """Serve a store; `node` holds settings of the node."""
    loop = LoopThread.shared()
    settings = NodeSettings(in_process=True, **{"context": 192, "max_running": 4, "max_waiting": 8, **(node or {})})
    wanted = ApiSettings(**{"http": "127.0.0.1:0", "model_name": ("tiny", "other-name"), **api})
    with (
        open_store(str(store), settings, name="test", serving=True) as opened,
        serving(opened, str(store), settings, wanted, loop.loop) as running,
    ):
        answering = asyncio.run_coroutine_threadsafe(running.http.serve(), loop.loop)
        model = ServedModel(running)
        try:
            yield model
            model.idle()
        finally:
            running.http.stop()
            answering.result(60)


@pytest.fixture(scope="module")
def tiny(embedded_store):
    """The embedded model, for all tests of a module."""
    with served(embedded_store) as model:
        yield model

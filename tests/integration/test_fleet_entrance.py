"""The entrance of a fleet before nodes that are servers of the test: which node is asked, and what a client hears."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

pytest.importorskip("ray", reason="needs Ray")

from tierd.fleet.conversation import conversation_key, rank_nodes
from tierd.fleet.entrance import EntranceReplica

EVENT = b'data: {"choices": [{"text": "%d"}]}\n\n'
LATER = 20.0


class Node:
    """A server that reads a request and does what it is told to: behaviours are used up one by one, the last one stays.

    `answer`: JSON with its name; `busy`: 429; `die`: closes the connection; `stream`: three events; `die later`: closes
    it after two; `hang`: one event, and no more until the client goes.
    """

    def __init__(self, name, *behaviours):
        self.name = name
        self.behaviours = list(behaviours)
        self.asked = []
        self.began = asyncio.Event()
        self.left = asyncio.Event()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _serve(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = next((int(line[16:]) for line in head.splitlines() if line.startswith("content-length: ")), 0)
            self.asked.append((head, await reader.readexactly(length)))
            how = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
            await self._do(how, reader, writer)
        writer.close()

    async def _do(self, how, reader, writer):
        if how == "answer":
            self._whole(writer, "200 OK", {"node": self.name})
        elif how == "busy":
            self._whole(writer, "429 Too Many Requests", {"error": {"message": "full"}}, "retry-after: 7\r\n")
        elif how != "die":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for number in range({"stream": 3, "die later": 2, "hang": 1}[how]):
                event = EVENT % number
                writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            if how == "stream":
                writer.write(b"0\r\n\r\n")
            await writer.drain()
            if how == "hang":
                self.began.set()
                await reader.read(1)
                self.left.set()
        await writer.drain()

    @staticmethod
    def _whole(writer, status, content, more=""):
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{more}\r\n"
        writer.write(head.encode() + body)


@contextlib.asynccontextmanager
async def entrance(*nodes, **settings):
    """A client of an entrance that knows these nodes."""
    replica = EntranceReplica({"patience": 1.0, **settings}, [node.name for node in nodes], "tests")
    replica._book._addresses.update((node.name, node.address) for node in nodes)
    replica._watching = asyncio.ensure_future(asyncio.Event().wait())  # nobody is there to be asked
    app = Starlette(routes=[Route("/{path:path}", replica.__call__, methods=["GET", "POST"])])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://entrance.test", timeout=LATER) as client:
        client.replica = replica
        try:
            yield client
        finally:
            replica._watching.cancel()
            await replica._client.aclose()


def body_for(name, names):
    """A request whose conversation belongs to that node."""
    for number in range(1000):
        body = json.dumps({"prompt": f"p{number}"}).encode()
        if rank_nodes(conversation_key({}, body), names)[0] == name:
            return body
    raise AssertionError(name)


async def post(client, body, path="/v1/completions"):
    return await client.post(path, content=body, headers={"content-type": "application/json", "authorization": "k"})


async def test_nodes_are_looked_at_again_after_a_look_that_failed(monkeypatch):
    begun = []

    async def watch():
        begun.append(1)  # and ends, as by an error

    async with entrance() as client:
        monkeypatch.setattr(client.replica._book, "watch", watch)
        client.replica._watching.cancel()
        client.replica._watching = None
        for number in range(1, 4):
            await client.get("/health")
            await asyncio.sleep(0.01)
            assert len(begun) == number


@contextlib.asynccontextmanager
async def two(first, second):
    async with Node("a", *first) as a, Node("b", *second) as b, entrance(a, b) as client:
        yield client, a, b, body_for("a", ["a", "b"])


async def test_a_request_reaches_its_conversations_node_as_it_was_sent():
    async with two(["answer"], ["answer"]) as (client, a, b, body):
        for _ in range(3):
            answer = await post(client, body, "/v1/completions?x=1")
            assert (answer.json(), answer.headers["x-tierd-node"]) == ({"node": "a"}, "a")
        assert (len(a.asked), len(b.asked)) == (3, 0)
        head, sent = a.asked[0]
        assert head.startswith("post /v1/completions?x=1 http/1.1")
        assert {"host: entrance.test", "authorization: k", f"content-length: {len(body)}"} <= set(head.splitlines())
        assert sent == body


async def test_a_full_node_hands_over_and_when_all_are_full_the_client_is_told_so():
    async with two(["busy", "busy", "answer"], ["answer", "busy"]) as (client, _, b, body):
        assert (await post(client, body)).json() == {"node": "b"}
        refused = await post(client, body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
        assert (await post(client, body)).json() == {"node": "a"}
        assert len(b.asked) == 2


async def test_a_node_that_dies_before_it_answers_is_replaced_without_a_word():
    async with two(["die", "answer"], ["answer"]) as (client, a, b, body):
        assert (await post(client, body)).json() == {"node": "b"}
        # It is left alone for a while, and then has its conversations again.
        assert (await post(client, body)).json() == {"node": "b"}
        client.replica._book._lost.clear()
        assert (await post(client, body)).json() == {"node": "a"}
        assert (len(a.asked), len(b.asked)) == (2, 2)


async def test_a_stream_passes_event_by_event_and_one_that_breaks_off_says_so_at_its_end():
    async with two(["stream", "die later"], ["stream"]) as (client, _, b, body):
        whole = await post(client, body)
        assert whole.headers["content-type"].startswith("text/event-stream")
        assert whole.content == b"".join(EVENT % number for number in range(3))
        broken = (await post(client, body)).content
        assert broken.startswith(EVENT % 0 + EVENT % 1)
        told = json.loads(broken.removeprefix(EVENT % 0 + EVENT % 1).removeprefix(b"data: "))
        assert "node a was lost in the middle" in told["error"]["message"]
        client.replica._book._lost.clear()
        anthropic = (await post(client, body, "/v1/messages")).content
        assert b"event: error\ndata: " in anthropic
        assert b.asked == []


async def test_a_client_that_goes_ends_its_request_at_the_node():
    async with two(["hang"], ["answer"]) as (client, a, _, body):
        asking = asyncio.ensure_future(post(client, body))
        await asyncio.wait_for(a.began.wait(), LATER)
        await asyncio.sleep(0.1)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(a.left.wait(), LATER)


async def test_where_no_node_is_the_client_waits_and_is_told():
    async with Node("a", "die") as dying, entrance(dying, patience=0.2) as client:
        refused = await post(client, b"{}")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert "no node" in refused.json()["error"]["message"]
        health = await client.get("/health")
        assert (health.status_code, health.json()["nodes"]) == (503, {"a": "away"})
    async with Node("a", "answer") as node, entrance(node) as client:
        address = client.replica._book._addresses.pop("a")
        asking = asyncio.ensure_future(post(client, b"{}"))
        await asyncio.sleep(0.3)
        client.replica._book._addresses["a"] = address
        assert (await asking).json() == {"node": "a"}
        assert (await client.get("/health")).json() == {"status": "ok", "nodes": {"a": "serving"}}


async def test_requests_that_kill_every_node_do_not_go_on_for_ever():
    nodes = [Node(name, "die") for name in "abcdef"]
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node)
        client = await stack.enter_async_context(entrance(*nodes))
        lost = await post(client, b"{}")
        assert lost.status_code == 502
        assert "4 nodes died under this request" in lost.json()["error"]["message"]
        assert sum(len(node.asked) for node in nodes) == 4


async def test_a_body_that_is_too_large_is_refused():
    async with Node("a", "answer") as node, entrance(node, max_body="1KiB") as client:
        assert (await post(client, b"x" * 1025)).status_code == 413
        assert node.asked == []

"""Peers that lie, flood, stall or send garbage: each hurts its own session alone, while a good node is served."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

import grpc.aio
import pytest
from daemons import eventually, on_loop
from sessions import RawSession

from tierd.addresses import Address
from tierd.api import session_pb2 as pb
from tierd.api import session_pb2_grpc
from tierd.arena.attach import attach
from tierd.client.arena_source import ArenaSource
from tierd.client.source import Phase
from tierd.errors import DaemonUnavailable
from tierd.rpc import PROTOCOL
from tierd.service.message_socket import MOST_PACKET_BYTES
from tierd.service.session_service import SessionService


@pytest.fixture(scope="module")
def daemon(serve_module, pattern_store):
    return serve_module(pattern_store.path, "--arena", "25%", "--max-sessions", "8")


@pytest.fixture
def peer(daemon):
    """Opens raw streams; ends them with the test."""
    opened = []

    def open_stream():
        opened.append(RawSession(daemon.address))
        return opened[-1]

    yield open_stream
    for raw in opened:
        raw.close()


@pytest.fixture(autouse=True)
def good_node(daemon, pattern_store):
    """A node that works through layers all the while, and must neither fail nor starve."""
    source = ArenaSource(daemon.address, pattern_store, name="good", numerics="exact", kernel_path="none")
    stop = threading.Event()
    failures = []
    visits = 0

    def work():
        nonlocal visits
        try:
            while not stop.wait(0.005):
                source.visit(visits % 4, [visits % 15, 15], lambda *_: None, step=visits, phase=Phase.DECODE)
                visits += 1
        except Exception as error:  # noqa: BLE001, reported below
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    eventually(lambda: visits or failures)
    yield source
    before = visits
    eventually(lambda: visits > before or failures)
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    source.close()
    assert not failures
    eventually(lambda: daemon.stats()["sessions"] == [])
    counted = daemon.stats()
    assert counted["arena"]["slots_granted"] == counted["requests"]["pending"] == 0
    assert daemon.session_blocks() == 0


ACQUIRE = pb.Acquire(id=1, layer=0, experts=[1])


@pytest.mark.parametrize("first", [{"acquire": ACQUIRE}, {"release": pb.Release(acquire_id=1)}, {}], ids=str)
def test_a_session_begins_with_a_hello(peer, first):
    raw = peer()
    raw.send(**first)
    code, detail = raw.status()
    assert code.name == "FAILED_PRECONDITION"
    assert "hello" in detail


@pytest.mark.parametrize(
    ("hello", "code", "words"),
    [
        ({"protocol": 99}, "FAILED_PRECONDITION", ["99", "1"]),
        ({"protocol": 0}, "FAILED_PRECONDITION", ["0", "1"]),
        ({"fingerprint": "ab" * 32}, "FAILED_PRECONDITION", ["abababababab", "{own}"]),
        ({"name": "n" * 65}, "INVALID_ARGUMENT", ["64"]),
        ({"name": "n" * 200_000}, "INVALID_ARGUMENT", ["64"]),
        ({"name": "n" * 400_000}, "RESOURCE_EXHAUSTED", ["262144"]),
    ],
    ids=["protocol from the future", "no protocol", "another store", "long name", "huge name", "oversized message"],
)
def test_a_hello_that_does_not_fit_is_refused_with_both_sides_named(peer, pattern_store, hello, code, words):
    raw = peer()
    raw.send(hello=pb.Hello(**{"protocol": PROTOCOL, "name": "bad"} | hello))
    status, detail = raw.status()
    assert status.name == code
    for word in words:
        assert word.format(own=pattern_store.fingerprint[:12]) in detail


@pytest.mark.parametrize(
    ("acquire", "code", "words"),
    [
        ({"experts": range(1_000_000)}, "RESOURCE_EXHAUSTED", ["262144"]),
        ({"experts": [1] * 100_000}, "INVALID_ARGUMENT", ["100000 experts"]),
        ({"experts": range(9)}, "INVALID_ARGUMENT", ["9 experts", "between 1 and 8"]),
        ({"experts": []}, "INVALID_ARGUMENT", ["0 experts"]),
        ({"experts": [3, 3]}, "INVALID_ARGUMENT", ["twice"]),
        ({"experts": [16]}, "INVALID_ARGUMENT", ["16"]),
        ({"experts": [2**32 - 1]}, "INVALID_ARGUMENT", [str(2**32 - 1)]),
        ({"experts": [1], "layer": 4}, "INVALID_ARGUMENT", ["4"]),
        ({"experts": [1], "layer": 2**31}, "INVALID_ARGUMENT", [str(2**31)]),
    ],
    ids=["a million", "a hundred thousand", "too many", "none", "twice", "unknown", "2^32-1", "layer", "layer 2^31"],
)
def test_an_impossible_acquire_ends_the_session_that_sent_it(daemon, peer, acquire, code, words):
    raw = peer()
    raw.hello()
    requests = daemon.stats()["requests"]["failed"]
    raw.send(acquire=pb.Acquire(**{"id": 1, "layer": 0} | acquire))
    status, detail = raw.status()
    assert status.name == code
    for word in words:
        assert word in detail
    assert daemon.stats()["requests"]["failed"] == requests


def test_a_second_hello_and_an_empty_message_end_the_session(peer):
    for message in ({"hello": pb.Hello(protocol=PROTOCOL)}, {}):
        raw = peer()
        raw.hello()
        raw.send(**message)
        assert raw.status()[0].name == "FAILED_PRECONDITION"


def test_absurd_hints_cost_nothing_and_end_nothing(daemon, peer):
    raw = peer()
    raw.hello()
    raw.send(hint=pb.Hint(layer=2**31, experts=range(50_000), probabilities=[float("nan"), -1.0, 1e30]))
    raw.send(hint=pb.Hint())
    raw.send(release=pb.Release(acquire_id=2**63))
    raw.send(cancel=pb.Cancel(acquire_id=77))
    raw.acquire(0, [1])
    ready, _ = raw.answers(1)
    assert set(ready) == {1}
    hinted = daemon.stats()["prefetch"]
    assert not any(hinted[name]["experts"] for name in ("used", "late", "wasted", "pending")), "none was read ahead"


def test_a_node_that_floods_and_does_not_read_is_ended_in_bounded_memory(daemon):
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    raw = RawSession(daemon.address, window)
    raw.hello(name="flood")
    before = daemon.rss_bytes()
    acquires = (pb.Acquire(id=number, layer=0, experts=range(8)) for number in range(1, 20_001))
    raw.flood(pb.OpenSessionRequest(acquire=acquire) for acquire in acquires)
    eventually(lambda: all(s["name"] != "flood" for s in daemon.stats()["sessions"]))
    assert any("does not read its answers" in event.get("why", "") for event in daemon.events)
    assert daemon.rss_bytes() - before < 16 << 20
    raw.close()


def garbage():
    yield b""
    yield b"\0"
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(4096)
    yield os.urandom(40)
    yield os.urandom(1 << 20)


@pytest.mark.parametrize("end", ["d.sock", "d.sock.attach"])
def test_garbage_on_a_socket_closes_that_connection(daemon, end):
    for data in garbage():
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(60)
            raw.connect(str(daemon.folder / end))
            try:
                raw.sendall(data)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(65536):
                    pass
            except (BrokenPipeError, ConnectionResetError):
                pass
    assert daemon.process.poll() is None


def test_a_token_attaches_once_and_to_its_own_session_only(daemon, peer):
    raw = peer()
    welcome = raw.hello(name="token")
    memory = attach(welcome.attach_path, welcome.attach_token)
    with pytest.raises(DaemonUnavailable):
        attach(welcome.attach_path, welcome.attach_token)
    with pytest.raises(DaemonUnavailable):
        attach(welcome.attach_path, os.urandom(32))
    assert [s["attached"] for s in daemon.stats()["sessions"] if s["name"] == "token"] == [True]
    memory.close()
    # The end of its life line ends the session, whatever the stream says.
    assert raw.status()[0].name == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("packet", "code", "words"),
    [
        (b"\xff" * 40, "FAILED_PRECONDITION", "no message"),
        (bytes(MOST_PACKET_BYTES + 1), "INVALID_ARGUMENT", "larger"),
        (pb.OpenSessionRequest(hello=pb.Hello()).SerializeToString(), "FAILED_PRECONDITION", "hello"),
        (pb.OpenSessionRequest(acquire=pb.Acquire(id=1, experts=[99])).SerializeToString(), "INVALID_ARGUMENT", "99"),
    ],
    ids=["garbage", "too large", "a second hello", "an impossible acquire"],
)
def test_a_bad_packet_ends_the_session_that_sent_it_and_its_stream_says_why(daemon, peer, packet, code, words):
    raw = peer()
    welcome = raw.hello(name="packets")
    assert welcome.packet_messages
    memory = attach(welcome.attach_path, welcome.attach_token)
    with socket.socket(fileno=memory.take_message_fd()) as node:
        node.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MOST_PACKET_BYTES)
        node.settimeout(60)
        node.send(packet)
        assert node.recv(100) == b"", "the daemon closed its end"
        status, detail = raw.status()
        assert (status.name, words in detail) == (code, True)
    memory.close()
    eventually(lambda: all(s["name"] != "packets" for s in daemon.stats()["sessions"]))


def test_a_node_that_floods_with_packets_and_does_not_read_is_ended(peer):
    raw = peer()
    welcome = raw.hello(name="flood")
    memory = attach(welcome.attach_path, welcome.attach_token)
    with socket.socket(fileno=memory.take_message_fd()) as node:
        node.settimeout(60)
        with suppress(BrokenPipeError, ConnectionResetError):
            for number in range(1, 20_001):
                acquire = pb.Acquire(id=number, layer=0, experts=range(8))
                node.send(pb.OpenSessionRequest(acquire=acquire).SerializeToString())
        assert "does not read its answers" in raw.status()[1]
    memory.close()


def test_many_sessions_that_come_and_go_leave_nothing(daemon):
    fds = daemon.descriptors()
    for number in range(30):
        raw = RawSession(daemon.address)
        if number % 3:
            raw.hello()
        if number % 3 == 2:
            raw.acquire(1, [number % 16])
        raw.close()
    eventually(lambda: len(daemon.stats()["sessions"]) == 1)
    eventually(lambda: daemon.descriptors() <= fds + 4)


def test_a_silent_peer_is_shown_the_door(folder):
    """Here with a shorter patience than the daemon's 10 s, in a server of this process."""
    service = SessionService(
        broker=None, attacher=None, fingerprint="", boot_id="", tiers=[], drive_tier=1,
        max_sessions=1, default_deadline=1.0, hello_seconds=0.05,
    )  # fmt: skip
    address = Address(path=folder / "x.sock")

    async def start():
        server = grpc.aio.server()
        session_pb2_grpc.add_SessionServiceServicer_to_server(service, server)
        server.add_insecure_port(address.target)
        await server.start()
        return server

    server = on_loop(start())
    silent = RawSession(address)
    code, detail = silent.status()
    assert code.name == "FAILED_PRECONDITION"
    assert "no hello came within 0.05 s" in detail
    silent.close()
    on_loop(server.stop(0))

"""Packets between a node and its session on one host: whole, in order, bounded, and their end is seen."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from queue import Empty, SimpleQueue

import pytest

from tierd.api import session_pb2 as pb
from tierd.client import session_messages
from tierd.client.loop_thread import LoopThread
from tierd.client.session_messages import PacketMessages
from tierd.errors import DaemonUnavailable, LimitExceeded
from tierd.requests import Granted, Outcome, Reason, Refused
from tierd.service.message_socket import MOST_PACKET_BYTES, MessageSocket
from tierd.service.session import Session

TIERS = {Outcome.HIT: 0, Outcome.MISS: 1, Outcome.JOINED: 1}


@pytest.fixture
async def pair():
    """The daemon's end, listening; the node's end; and what the daemon heard."""
    ours, heard = MessageSocket(), asyncio.Queue()
    ours.listen(heard.put_nowait)
    node = socket.socket(fileno=os.dup(ours.node_fd))
    node.settimeout(20)
    yield ours, node, heard
    node.close()
    ours.close()


async def test_messages_arrive_whole_and_in_order(pair):
    ours, node, heard = pair
    for number in range(40):
        await asyncio.to_thread(node.send, bytes([number]) * 1000)
    assert [await heard.get() for _ in range(40)] == [bytes([number]) * 1000 for number in range(40)]
    assert ours.send(b"one")
    assert ours.send(b"two")
    assert [node.recv(100), node.recv(100)] == [b"one", b"two"]


async def test_a_packet_larger_than_a_message_can_be_is_told_of_and_not_taken(pair):
    _, node, heard = pair
    node.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MOST_PACKET_BYTES)
    node.send(bytes(MOST_PACKET_BYTES))
    node.send(bytes(MOST_PACKET_BYTES + 1))
    assert len(await heard.get()) == MOST_PACKET_BYTES
    assert await heard.get() is None


async def test_a_node_that_reads_late_gets_everything_and_one_that_never_does_is_found_out(pair):
    ours, node, _ = pair
    sent = 0
    while not ours._unsent:
        assert ours.send(sent.to_bytes(4) * 1000)
        sent += 1
    for _ in range(3):
        assert ours.send(sent.to_bytes(4) * 1000)
        sent += 1
    received = [await asyncio.to_thread(node.recv, 8000) for _ in range(sent)]
    assert received == [number.to_bytes(4) * 1000 for number in range(sent)]
    assert not all(ours.send(bytes(4000)) for _ in range(2000))


async def test_both_sides_see_the_end(pair):
    ours, node, heard = pair
    ours.shut()
    assert node.recv(10) == b""
    assert ours.send(b"nobody hears this")
    ours.shut()
    assert heard.empty()


async def test_answers_leave_by_the_socket_once_the_node_asked_by_it_and_none_is_too_large():
    ours = MessageSocket()
    ours.listen(lambda _packet: None)
    node = socket.socket(fileno=os.dup(ours.node_fd))
    node.settimeout(20)
    session = Session(1, "test", TIERS)
    session.packets, session.by_packets = ours, True
    session.asked(7, 1300)
    session.answered(7, [Granted(expert, 1, Outcome.MISS) for expert in range(300)], [])
    await asyncio.sleep(0)
    session.answered(7, [], [Refused(expert, Reason.DATA_LOSS, "why " * 100) for expert in range(300, 1300)])
    experts = []
    while len(experts) < 1300:
        packet = await asyncio.to_thread(node.recv, 1 << 20)
        assert len(packet) <= MOST_PACKET_BYTES
        notice = pb.OpenSessionResponse.FromString(packet).notice
        assert notice.acquire_id == 7
        experts += [said.expert for said in (*notice.ready, *notice.failed)]
    assert experts == list(range(1300))
    session.end(LimitExceeded("over"))
    assert node.recv(10) == b""
    node.close()
    ours.close()


class Link:
    """The stream of a session that says nothing by itself."""

    def __init__(self):
        self.lost = None
        self.inbox = SimpleQueue()
        self.ended = lambda: None

    def end(self, error):
        self.lost = error
        self.inbox.put(error)
        self.ended()


@pytest.fixture
def node(monkeypatch):
    """The node's end in a session, its stream, and the daemon's end in the hands of the test."""
    monkeypatch.setattr(session_messages, "IDLE_RELEASE_SECONDS", 0.001)
    daemon, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    daemon.settimeout(20)
    link = Link()
    messages = PacketMessages(link, LoopThread.shared(), theirs.detach())
    yield messages, link, daemon
    messages.close()
    daemon.close()


def heard(daemon):
    return pb.OpenSessionRequest.FromString(daemon.recv(1 << 20))


def acquire(number):
    return pb.OpenSessionRequest(acquire=pb.Acquire(id=number, layer=1, experts=[2, 3]))


def test_a_node_hears_its_answers_and_passes_over_what_is_none(node):
    messages, _, daemon = node
    messages.send(acquire(5))
    assert heard(daemon) == acquire(5)
    daemon.send(pb.OpenSessionResponse(draining=pb.Draining(reason="soon")).SerializeToString())
    daemon.send(pb.OpenSessionResponse(notice=pb.Notice(acquire_id=5)).SerializeToString())
    assert messages.take(20.0).acquire_id == 5
    with pytest.raises(Empty):
        messages.take(0.0)


def test_what_a_node_holds_is_given_back_when_it_asks_for_nothing_else(node):
    messages, _, daemon = node
    for number in (1, 2):
        messages.send(acquire(number))
        assert heard(daemon).acquire.id == number
        messages.release_when_idle(number)
        assert heard(daemon).release.acquire_id == number
    assert messages.sent == 4


def test_a_release_after_the_looks_have_ended_begins_them_again(node):
    messages, _, daemon = node
    messages.release_when_idle(1)
    assert heard(daemon).release.acquire_id == 1
    while messages._watched:
        time.sleep(0.001)
    messages.release_when_idle(2)
    assert heard(daemon).release.acquire_id == 2


def test_a_hint_never_waits_for_a_daemon_that_does_not_read(node):
    messages, _, _ = node
    before = -1
    while messages.sent > before:
        before = messages.sent
        messages.mention(pb.OpenSessionRequest(step=pb.Step(step=1, tokens=range(1000))))
    assert messages.sent > 1


def told_as_the_stream_ends(messages, link, why):
    """What somebody hears who asks while the stream ends."""
    ending = threading.Timer(0.05, link.end, [why])
    ending.start()
    messages.send(acquire(1))
    answer = messages.take(20.0)
    ending.join()
    return answer


@pytest.mark.parametrize("waits_for", ["an answer", "the daemon to read"])
def test_the_end_of_the_stream_wakes_who(node, waits_for):
    messages, link, _ = node
    why = DaemonUnavailable("it went away")
    if waits_for == "the daemon to read":
        test_a_hint_never_waits_for_a_daemon_that_does_not_read(node)
    assert told_as_the_stream_ends(messages, link, why) is why


def test_the_socket_that_ends_first_waits_for_what_the_stream_says(node):
    messages, link, daemon = node
    why = LimitExceeded("too much")
    daemon.shutdown(socket.SHUT_RDWR)
    assert told_as_the_stream_ends(messages, link, why) is why


def test_packets_that_are_no_messages_end_the_session(node):
    messages, _, daemon = node
    daemon.send(b"\xff\xff\xff")
    assert isinstance(messages.take(20.0), DaemonUnavailable)

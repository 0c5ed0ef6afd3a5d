"""The attach socket with real sockets and real node processes (`--event-loop asyncio` for the other loop)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading

import pytest

from tierd.arena import attach_server
from tierd.arena.attach import attach
from tierd.arena.attach_server import AttachServer
from tierd.arena.attach_wire import ANSWER_LENGTH, HELLO_BYTES, ArenaDescription, ArenaOffer, hello, token_of
from tierd.arena.memory import SharedPayload
from tierd.arena.session_block import SessionBlockReader
from tierd.arena.table import ResidencyTable, pack
from tierd.errors import ArenaError, DaemonUnavailable, LimitExceeded

BOOT = b"B" * 16
ENTRIES = 40


class Daemon:
    """Payload, table and one session, as the daemon holds them, with an attach server in front."""

    def __init__(self, directory, **options):
        self.path = directory / "run" / "attach.sock"
        self.payload = SharedPayload.create(8192 * 3)
        self.table = ResidencyTable.create(BOOT, slot_bytes=8192, slots=3, entries=ENTRIES)
        self.block = SessionBlockReader.create(ENTRIES)
        self.messages, self.node_messages = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.gone: asyncio.Queue[int] = asyncio.Queue()
        self.now = 0.0
        offer = ArenaOffer(
            self.payload.reader_fd(), self.payload.nbytes, self.table.reader_fd(), BOOT, 8192, 3, ENTRIES
        )
        self.server = AttachServer(self.path, offer, self.gone.put_nowait, clock=lambda: self.now, **options)

    def offer(self, session=1):
        return self.server.offer(session, block_fd=self.block.fd, message_fd=self.node_messages.fileno())

    async def attach(self, token):
        return await asyncio.to_thread(attach, self.path, token, 30.0)

    async def gone_session(self):
        return await asyncio.wait_for(self.gone.get(), 60)

    async def __aenter__(self):
        await self.server.start()
        return self

    async def __aexit__(self, *_):
        await self.server.close()
        for part in (self.payload, self.table, self.block):
            part.close()
        self.messages.close()
        self.node_messages.close()


@pytest.fixture
def connect():
    """Raw connections that are closed afterwards."""
    made = []

    def connect_to(path):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.append(connection)
        connection.settimeout(60)
        connection.connect(str(path))
        return connection

    yield connect_to
    for connection in made:
        connection.close()


async def closed_by_peer(connection):
    """Wait until the daemon closes the connection without having sent a byte."""
    try:
        return await asyncio.to_thread(connection.recv, 1) == b""
    except ConnectionResetError:
        return True


async def test_a_token_becomes_shared_memory_in_both_directions(tmp_path):
    async with Daemon(tmp_path) as daemon:
        node = await daemon.attach(daemon.offer(17))
        assert (node.boot_id, node.slot_bytes, node.slots, node.entries) == (BOOT, 8192, 3, ENTRIES)
        daemon.payload.view(8192, 5)[:] = b"bytes"
        daemon.table.store(39, pack(1, 1))
        assert node.table.load(39) == pack(1, 1)
        assert bytes(node.payload.view(node.slot_address(1) - node.payload.address, 5)) == b"bytes"
        node.block.note_use(39, 4)
        node.block.begin_step(4)
        assert ([use.expert for use in daemon.block.take_uses()], daemon.block.step()) == ([39], 4)
        daemon.messages.send(b"message")
        assert os.read(node.message_fd, 100) == b"message"
        assert node.alive()
        assert daemon.server.attached(17)
        node.close()
        assert await daemon.gone_session() == 17
        assert not daemon.server.attached(17)
        assert daemon.server.refused == 0


async def test_a_killed_node_is_noticed_by_its_life_line(tmp_path):
    async with Daemon(tmp_path) as daemon:
        node = (
            "import sys, time; from tierd.arena.attach import attach\n"
            "held = attach(sys.argv[1], bytes.fromhex(sys.argv[2])); print('in', flush=True); time.sleep(60)\n"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", node, str(daemon.path), daemon.offer(5).hex(), stdout=asyncio.subprocess.PIPE
        )
        assert await process.stdout.readline() == b"in\n"
        process.send_signal(signal.SIGSTOP)
        assert daemon.server.attached(5), "silence is not death"
        assert daemon.gone.empty()
        process.kill()
        assert await daemon.gone_session() == 5
        await process.wait()


async def test_a_node_notices_the_daemon_going(tmp_path):
    daemon = Daemon(tmp_path)
    async with daemon:
        node = await daemon.attach(daemon.offer())
        assert node.alive()
    assert not node.alive()
    assert daemon.gone.empty(), "closing the server is not the node's death"
    assert not daemon.path.exists()
    node.close()
    node.close()


async def test_ending_a_session_closes_its_life_line_and_its_token_without_a_call_back(tmp_path):
    async with Daemon(tmp_path) as daemon:
        node = await daemon.attach(daemon.offer(1))
        unused = daemon.offer(2)
        daemon.server.end(1)
        daemon.server.end(2)
        daemon.server.end(3)
        assert await closed_by_peer(node.lifeline)
        with pytest.raises(DaemonUnavailable, match="token"):
            await daemon.attach(unused)
        assert daemon.gone.empty()
        node.close()


async def test_a_token_is_good_once(tmp_path):
    async with Daemon(tmp_path) as daemon:
        token = daemon.offer()
        node = await daemon.attach(token)
        with pytest.raises(DaemonUnavailable, match="token"):
            await daemon.attach(token)
        assert node.alive()
        assert daemon.server.refused == 1
        node.close()


async def test_a_second_token_of_an_attached_session_is_refused(tmp_path):
    async with Daemon(tmp_path) as daemon:
        node = await daemon.attach(daemon.offer(1))
        with pytest.raises(DaemonUnavailable):
            await daemon.attach(daemon.offer(1))
        assert node.alive()
        node.close()


async def test_a_token_expires(tmp_path):
    async with Daemon(tmp_path) as daemon:
        token = daemon.offer()
        daemon.now = 10.0
        with pytest.raises(DaemonUnavailable, match="too old") as caught:
            await daemon.attach(token)
        assert "new session" in caught.value.hint


async def test_outstanding_tokens_are_bounded_and_expired_ones_make_room(tmp_path):
    async with Daemon(tmp_path) as daemon:
        for session in range(256):
            daemon.offer(session)
        with pytest.raises(LimitExceeded, match="256"):
            daemon.offer(999)
        daemon.now = 10.0
        assert len(daemon.offer(999)) == 32


@pytest.mark.parametrize(
    "frame", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n......", hello(b"\0" * 32), b"\xff" * 4096, b""]
)
async def test_garbage_is_closed_and_harms_nobody(tmp_path, connect, frame):
    async with Daemon(tmp_path) as daemon:
        node = await daemon.attach(daemon.offer())
        stranger = connect(daemon.path)
        stranger.sendall(frame)
        stranger.shutdown(socket.SHUT_WR)
        assert await closed_by_peer(stranger)
        assert node.alive()
        assert daemon.server.refused == 1
        node.close()


async def test_a_silent_connection_is_closed_in_time(tmp_path, connect, monkeypatch):
    monkeypatch.setattr(attach_server, "_HELLO_SECONDS", 0.05)
    async with Daemon(tmp_path) as daemon:
        silent = connect(daemon.path)
        silent.sendall(hello(daemon.offer())[: HELLO_BYTES - 1])
        assert await closed_by_peer(silent)


async def test_a_slow_hello_in_pieces_is_understood(tmp_path, connect):
    async with Daemon(tmp_path) as daemon:
        slow = connect(daemon.path)
        for byte in hello(daemon.offer(3)):
            slow.sendall(bytes([byte]))
            await asyncio.sleep(0)
        answer, fds, _, _ = await asyncio.to_thread(socket.recv_fds, slow, 4096, 8)
        assert len(fds) == 4
        assert ArenaDescription.parse(answer[ANSWER_LENGTH.size :]).entries == ENTRIES
        for fd in fds:
            os.close(fd)


async def test_more_connections_than_allowed_are_closed_and_others_live_on(tmp_path, connect):
    async with Daemon(tmp_path, max_connections=2) as daemon:
        node = await daemon.attach(daemon.offer(1))
        waiting = connect(daemon.path)
        surplus = connect(daemon.path)
        assert await closed_by_peer(surplus)
        waiting.close()
        node.close()
        assert await daemon.gone_session() == 1
        again = await daemon.attach(daemon.offer(2))
        assert again.alive()
        again.close()


async def test_a_node_that_writes_to_its_life_line_loses_it(tmp_path):
    async with Daemon(tmp_path) as daemon:
        node = await daemon.attach(daemon.offer(8))
        node.lifeline.sendall(b"x" * 100)
        assert await daemon.gone_session() == 8
        node.close()


async def test_another_user_is_refused(tmp_path, monkeypatch):
    async with Daemon(tmp_path) as daemon:
        monkeypatch.setattr(attach_server, "_peer_user", lambda _: os.geteuid() + 1)
        with pytest.raises(DaemonUnavailable, match="user"):
            await daemon.attach(daemon.offer())


async def test_socket_and_directory_are_closed_to_others(tmp_path):
    async with Daemon(tmp_path) as daemon:
        assert daemon.path.stat().st_mode & 0o777 == 0o600
        assert daemon.path.parent.stat().st_mode & 0o777 == 0o700


async def test_a_directory_that_others_can_change_is_refused(tmp_path):
    daemon = Daemon(tmp_path)
    daemon.path.parent.mkdir()
    daemon.path.parent.chmod(0o777)
    with pytest.raises(ArenaError, match="other users") as caught:
        await daemon.server.start()
    assert "chmod 700" in caught.value.hint
    await daemon.__aexit__()


async def test_a_killed_daemons_socket_is_replaced_a_living_ones_is_not(tmp_path):
    async with Daemon(tmp_path) as daemon:
        second = Daemon(tmp_path)
        with pytest.raises(ArenaError, match="another daemon"):
            await second.server.start()
        await second.__aexit__()
        assert daemon.path.exists()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left_behind:
        left_behind.bind(str(daemon.path))
    async with Daemon(tmp_path) as third:
        (await third.attach(third.offer())).close()


async def test_paths_that_cannot_be_sockets_are_named(tmp_path):
    daemon = Daemon(tmp_path)
    daemon.path.parent.mkdir()
    daemon.path.write_text("mine")
    with pytest.raises(ArenaError, match="not a socket"):
        await daemon.server.start()
    assert daemon.path.read_text() == "mine"
    await daemon.__aexit__()
    long = Daemon(tmp_path / ("d" * 100))
    with pytest.raises(ArenaError, match="longer than 107"):
        await long.server.start()
    await long.__aexit__()


def test_without_a_daemon_the_node_says_so(tmp_path):
    with pytest.raises(DaemonUnavailable, match=r"absent\.sock") as caught:
        attach(tmp_path / "absent.sock", b"t" * 32)
    assert "Start the daemon" in caught.value.hint
    with pytest.raises(ArenaError, match="32 bytes"):
        attach(tmp_path / "absent.sock", b"short")


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"", DaemonUnavailable, "closed the attach connection"),
        (b"\xff\xff\xff\xff", ArenaError, "not a tierd daemon"),
        (ANSWER_LENGTH.pack(2) + b"{}", ArenaError, "0 descriptors"),
        (None, DaemonUnavailable, "did not answer within"),
    ],
    ids=["closes", "absurd length", "no descriptors", "silent"],
)
def test_a_strange_daemon_is_a_clear_error(tmp_path, answer, error, message):
    path = tmp_path / "strange.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        over = threading.Event()

        def answer_one():
            connection, _ = listener.accept()
            with connection:
                connection.recv(HELLO_BYTES)
                if answer is None:
                    over.wait(10)
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=answer_one)
        thread.start()
        with pytest.raises(error, match=message):
            attach(path, b"t" * 32, timeout=0.3 if answer is None else 60)
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[", "malformed"),
        (b"{}", "malformed"),
        (b"[1]", "malformed"),
        (b'{"version": 2}', "version 2"),
        (
            b'{"version":1,"boot_id":"00","payload_bytes":1,"slot_bytes":1,"slots":1,"entries":1}',
            "impossible",
        ),
        (
            b'{"version":1,"boot_id":"%s","payload_bytes":4096,"slot_bytes":4096,"slots":2,"entries":1}' % (b"0" * 32),
            "2 slots of 4096 bytes",
        ),
    ],
)
def test_a_malformed_description_is_refused(body, message):
    with pytest.raises(ArenaError, match=message):
        ArenaDescription.parse(body)


def test_frames_that_are_none_hold_no_token():
    assert token_of(hello(b"k" * 32)) == b"k" * 32
    assert token_of(hello(b"k" * 32)[:-1]) is None
    assert token_of(b"x" * HELLO_BYTES) is None

"""How `tierd serve` starts, refuses to start, and stops."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from daemons import command, eventually
from sessions import RawSession

from tierd import cli
from tierd.api import session_pb2 as pb
from tierd.client.arena_source import ArenaSource
from tierd.client.private_daemon import PrivateDaemon
from tierd.client.source import Phase
from tierd.errors import UsageError
from tierd.service.daemon import Daemon
from tierd.settings import ServeSettings
from tierd.store.store import ExpertStore


def refused(*arguments):
    """Exit code and message of a `tierd serve` that must not start."""
    run = command("tierd", "serve", *arguments)
    assert "Traceback" not in run.stderr
    assert not run.stdout
    return run.returncode, run.stderr


@pytest.fixture
def socket_option(folder):
    return "--listen", f"unix:{folder}/x.sock", "--http", "off"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_drains_waiting_requests_are_answered_and_new_nodes_refused(serve, pattern_store, number):
    daemon = serve(pattern_store.path, "--arena", 2 * pattern_store.geometry.slot_bytes)
    holder, waiter = RawSession(daemon.address), RawSession(daemon.address)
    holder.hello()
    waiter.hello()
    held = holder.acquire(0, [0, 1])
    holder.answers(2)
    waiter.acquire(0, [2, 3])
    eventually(lambda: daemon.stats()["requests"]["pending"] == 2)
    daemon.process.send_signal(number)
    assert holder.read().draining.reason
    assert waiter.read().draining.reason
    late = RawSession(daemon.address)
    late.send(hello=pb.Hello(protocol=1))
    code, detail = late.status()
    assert code.name == "UNAVAILABLE"
    assert "stopping" in detail
    holder.send(release=pb.Release(acquire_id=held))
    ready, failed = waiter.answers(2)
    assert set(ready) == {2, 3}
    assert not failed
    assert daemon.stop() == 0
    for raw in (holder, waiter, late):
        raw.close()


def test_a_drain_is_bounded_when_a_request_cannot_be_answered(serve, pattern_store):
    daemon = serve(pattern_store.path, "--arena", 2 * pattern_store.geometry.slot_bytes, "--drain-seconds", "0.3")
    holder, waiter = RawSession(daemon.address), RawSession(daemon.address)
    holder.hello()
    waiter.hello()
    holder.acquire(0, [0, 1])
    holder.answers(2)
    waiter.acquire(0, [2, 3])
    eventually(lambda: daemon.stats()["requests"]["pending"] == 2)
    assert daemon.stop() == 0
    assert [event["pending"] for event in daemon.events if event["level"] == "warning"] == [2]
    assert waiter.status()[0].name == "UNAVAILABLE"
    holder.close()
    waiter.close()


def test_sockets_are_private_and_gone_after_a_stop(serve, pattern_store):
    daemon = serve(pattern_store.path)
    sockets = [path for path in daemon.folder.iterdir() if path.is_socket()]
    assert sorted(path.name for path in sockets) == ["d.sock", "d.sock.attach"]
    assert {path.stat().st_mode & 0o777 for path in sockets} == {0o600}
    assert daemon.stop() == 0
    assert not list(daemon.folder.glob("d.sock*"))


def test_a_second_daemon_on_the_socket_is_refused_and_the_first_unharmed(serve, pattern_store):
    daemon = serve(pattern_store.path)
    code, words = refused(pattern_store.path, "--listen", daemon.listen, "--http", "off")
    assert code == 2
    assert f"another daemon (process {daemon.process.pid}) listens on" in words
    assert daemon.listen in words
    assert daemon.stats()["sessions"] == []


def test_a_path_that_is_not_utf8_is_shown_with_escapes(serve, pattern_store, folder):
    daemon = serve(pattern_store.path, "--history", "on", "--state-dir", folder / os.fsdecode(b"state\xff"))
    assert daemon.stats()["history"]["path"].startswith(f"{folder}/state\\xff/")


async def test_what_cannot_be_closed_keeps_nothing_else_open(folder, pattern_store):
    settings = ServeSettings(listen=f"unix:{folder}/x.sock", http="127.0.0.1:0", state_dir=folder)
    daemon = Daemon(ExpertStore.open(pattern_store.path), settings)
    await daemon.startup()

    def broken():
        raise OSError("this cannot be closed")

    daemon._closers.append(broken)
    with pytest.raises(OSError, match="this cannot be closed"):
        await daemon.shutdown()
    assert not list(folder.glob("x.sock*"))


def test_a_socket_left_by_a_killed_daemon_is_taken_over(serve, pattern_store):
    daemon = serve(pattern_store.path)
    first = daemon.stats()["boot_id"]
    daemon.kill()
    daemon.start()
    assert daemon.stats()["boot_id"] != first


def test_a_taken_port_is_refused_for_http_and_for_nodes(pattern_store, socket_option):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, words = refused(pattern_store.path, *socket_option[:2], "--http", f"127.0.0.1:{port}")
        assert code == 2
        assert f"--http: cannot listen on 127.0.0.1:{port}" in words
        code, words = refused(pattern_store.path, "--listen", f"127.0.0.1:{port}", "--http", "off")
        assert code == 2
        assert f"--listen: cannot listen on 127.0.0.1:{port}" in words


def test_a_loopback_port_serves_nodes(serve, pattern_store):
    daemon = serve(pattern_store.path, listen="127.0.0.1:0")
    assert daemon.address.port > 0
    source = ArenaSource(daemon.address, pattern_store, name="test", numerics="exact", kernel_path="none")
    seen = []
    source.visit(0, [3], lambda expert, _address: seen.append(expert), step=0, phase=Phase.DECODE)
    source.close()
    assert seen == [3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--listen", "0.0.0.0:9470"], ["--listen", "0.0.0.0:9470", "127.0.0.1:PORT"]),
        (["--listen", "[::]:9470"], ["--listen", "[::]:9470", "unix:PATH"]),
        (["--listen", "example.org:9470"], ["--listen", "example.org:9470"]),
        (["--listen", "nonsense"], ["--listen", "'nonsense'", "HOST:PORT"]),
        (["--listen", "unix:/" + "x" * 120], ["--listen", "107 bytes"]),
        (["--http", "0.0.0.0:9480"], ["--http", "0.0.0.0:9480"]),
        (["--http", "unix:/run/x"], ["--http", "HOST:PORT"]),
        (["--arena", "0%"], ["--arena", "0%"]),
        (["--arena", "lots"], ["--arena", "'lots'", "96GiB"]),
        (["--policy", "best"], ["best", "lru"]),
        (["--drive-threads", "0"], ["drive_threads", "--drive-threads", "TIERD_DRIVE_THREADS"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_option_is_refused_by_name_with_advice(capsys, monkeypatch, pattern_store, folder, options, words):
    code, said = run_here(capsys, monkeypatch, pattern_store.path, "--listen", f"unix:{folder}/x.sock", *options)
    assert code == 2
    for word in words:
        assert word in said


def run_here(capsys, monkeypatch, *arguments):
    """The same command line without a process of its own; for refusals before anything is opened."""
    monkeypatch.setattr(sys, "argv", ["tierd", "serve", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code, capsys.readouterr().err


def test_an_arena_that_holds_no_expert_is_refused_with_the_needed_figure(pattern_store, socket_option, folder):
    slot = pattern_store.geometry.slot_bytes
    code, words = refused(pattern_store.path, *socket_option, "--arena", slot - 1)
    assert code == 2
    assert str(slot) in words
    assert not any(path.is_socket() for path in folder.iterdir())


def test_a_folder_that_is_no_store_is_refused(capsys, monkeypatch, folder):
    code, words = run_here(capsys, monkeypatch, folder / "nothing")
    assert code == 2
    assert "nothing" in words
    (folder / "empty").mkdir()
    code, words = run_here(capsys, monkeypatch, folder / "empty")
    assert code == 2
    assert "store.json" in words


def test_a_damaged_store_is_refused_by_file(capsys, monkeypatch, pattern_store, folder):
    broken = folder / "broken"
    shutil.copytree(pattern_store.path, broken)
    shard = broken / pattern_store.manifest.shards[0].file
    os.truncate(shard, shard.stat().st_size - 1)
    code, words = run_here(capsys, monkeypatch, broken)
    assert code == 1
    assert shard.name in words


def test_a_shared_folder_for_the_socket_is_refused(pattern_store, folder):
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    code, words = refused(pattern_store.path, "--listen", f"unix:{shared}/x.sock", "--http", "off")
    assert code == 2
    assert "chmod 700" in words
    assert not list(shared.iterdir())


def test_too_many_nodes_are_refused_and_a_place_that_is_left_is_free_again(serve, pattern_store):
    daemon = serve(pattern_store.path, "--max-sessions", "2")
    first, second = RawSession(daemon.address), RawSession(daemon.address)
    first.hello()
    second.hello()
    third = RawSession(daemon.address)
    third.send(hello=pb.Hello(protocol=1))
    code, detail = third.status()
    assert code.name == "INVALID_ARGUMENT"
    assert "--max-sessions" in detail
    first.close()
    eventually(lambda: len(daemon.stats()["sessions"]) == 1)
    fourth = RawSession(daemon.address)
    assert fourth.hello().session_id
    for raw in (second, third, fourth):
        raw.close()


def test_a_daemon_of_ones_own_ends_with_its_parent(pattern_store, folder):
    """However the parent ends: here by SIGKILL, when it cannot stop anything."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom tierd.client.private_daemon import PrivateDaemon\n"
        "d = PrivateDaemon(Path(sys.argv[1]), '--http', 'off')\n"
        "print(d.pid, d.address, flush=True)\nsys.stdin.read()\n"
    )
    environment = os.environ | {"TMPDIR": str(folder)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(pattern_store.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    with parent.stdin, parent.stdout:
        pid, _address = parent.stdout.readline().split()
        os.kill(int(pid), 0)
        parent.kill()
        parent.wait()

        def gone():
            try:
                with open(f"/proc/{pid}/stat") as status:  # noqa: PTH123
                    return status.read().rpartition(")")[2].split()[0] == "Z"
            except FileNotFoundError:
                return True

        eventually(gone)


def test_a_private_daemon_says_why_it_did_not_start(pattern_store):
    with pytest.raises(UsageError, match=str(pattern_store.geometry.slot_bytes)):
        PrivateDaemon(pattern_store.path, "--arena", "1", "--http", "off")

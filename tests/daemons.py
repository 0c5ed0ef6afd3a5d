"""The real programs as child processes: daemons and compute nodes that tests start, watch, hurt and stop."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from compute_node import embedded
from tierd.addresses import Address, parse_address
from tierd.checkpoint.convert import convert
from tierd.client.daemon_stats import fetch_stats, stats_object
from tierd.client.loop_thread import LoopThread
from tierd.errors import DaemonUnavailable
from tierd.store.synthetic import make_store

PROMPT = "It was a fine morning, and"
START_SECONDS = 120.0
STOP_SECONDS = 30.0

# Sizes that are no chunk, one chunk, and more than one chunk of a transfer.
RECORD_BYTES = (16384, 1 << 20, 2502656)


def on_loop(work, seconds=60.0):
    """Run a coroutine on the process's only gRPC loop."""
    return LoopThread.shared().run(work, seconds=seconds, what="a test's call")


def eventually(condition, seconds=60.0):
    """Return the first true value of `condition()`; fail if none comes. The bound only ends a test that hangs."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"did not become true within {seconds:g} s"
        time.sleep(0.01)
    return value


def command(*arguments):
    """A finished run of a module's command line: exit code, stdout, stderr."""
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        capture_output=True, text=True, timeout=100, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


class Daemon:
    """`tierd serve` on a socket of its own."""

    def __init__(self, store, *options, folder, listen=None, http="off"):
        self.store = store
        self.folder = folder
        self.listen = listen or f"unix:{folder}/d.sock"
        self.options = ["--http", http, *map(str, options)]
        self.log_path = folder / "daemon.log"
        self.process = None

    def start(self):
        self.launch()
        self.wait_until_up()
        return self

    def launch(self, command=(sys.executable, "-m", "tierd")):
        before = self.log_path.stat().st_size if self.log_path.exists() else 0
        arguments = [*command, "serve", str(self.store), "--listen", self.listen, *self.options]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._log_start = before

    def wait_until_up(self):
        def up():
            assert self.process.poll() is None, self.log
            return re.search(r"^listening on (\S+)(?: · (\S+)/metrics)?$", self.log, flags=re.MULTILINE)

        found = eventually(up, START_SECONDS)
        self.name = found[1]
        self.http = found[2]
        host, _, port = found[1].rpartition(":")
        path = found[1].removeprefix("unix:") if found[1].startswith("unix:") else None
        self.address = Address(path=Path(path)) if path else Address(host=host, port=int(port))
        apart = re.search(r"^for this host (\S+)$", self.log, flags=re.MULTILINE)
        self.local = parse_address(apart[1], option="local") if apart else self.address

    @property
    def log(self):
        """What the latest process wrote."""
        return self.log_path.read_bytes()[self._log_start :].decode()

    @property
    def events(self):
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]

    def stats(self):
        return stats_object(on_loop(fetch_stats(self.local)))

    def check_sums(self):
        """Whatever happened: every request is decided once or pending, and so is every hinted expert."""
        counted = self.stats()
        asked = counted["requests"]
        outcomes = ("hits", "misses", "joined", "cancelled", "failed", "pending")
        assert asked["requests"] == sum(asked[name] for name in outcomes), asked
        hinted = counted["prefetch"]
        parts = [hinted.get(name, {}) for name in ("used", "late", "wasted", "cancelled", "pending")]
        parts += hinted["dropped"].values()
        for unit in ("experts", "bytes"):
            issued = hinted.get("issued", {}).get(unit, 0)
            assert issued == sum(part.get(unit, 0) for part in parts), hinted

    def session_blocks(self):
        """How many nodes' blocks the process holds."""
        inodes = set()
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if "tierd-session" in os.readlink(link):  # noqa: PTH115, the target is no path
                    inodes.add(link.stat().st_ino)
        return len(inodes)

    def descriptors(self):
        """How many files, sockets and pipes the process holds."""
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def rss_bytes(self):
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", text)[1]) << 10

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self, number=signal.SIGTERM):
        """Ask it to stop; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(STOP_SECONDS)


class Node:
    """`compute-node generate --events`: its lines as they come."""

    def __init__(self, store, *options, tokens=32, prompt=PROMPT, folder):
        self.words_path = Path(tempfile.mkstemp(dir=folder, prefix="node-", suffix=".err")[1])
        arguments = [sys.executable, "-m", "compute_node", "generate", str(store), "-p", prompt, "--ignore-eos"]
        arguments += ["--max-tokens", str(tokens), "--events", *map(str, options)]
        with self.words_path.open("wb") as words:
            self.process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=words, text=True
            )
        self.lines = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with self.process.stdout as lines:
            for line in lines:
                self.lines.put(json.loads(line))
        self.lines.put(None)

    @property
    def words(self):
        return self.words_path.read_text()

    def next(self, seconds=120.0):
        """The next event; None at the end."""
        return self.lines.get(timeout=seconds)

    def answering(self, tokens=2):
        """Wait until it is in the middle of its answer."""
        seen = 0
        while seen < tokens:
            event = self.next()
            assert event is not None, self.words
            seen += event["event"] == "token"
        return self

    def finish(self, seconds=120.0):
        """The event `done` of a run that must succeed."""
        last = None
        while (event := self.next(seconds)) is not None:
            last = event
        assert self.process.wait(seconds) == 0, self.words
        assert last["event"] == "done"
        return last

    def fail(self, seconds=120.0):
        """Exit code and last words of a run that must not succeed."""
        while (event := self.next(seconds)) is not None:
            assert event["event"] != "done"
        return self.process.wait(seconds), self.words

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(30)


@pytest.fixture
def folder():
    """A folder whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="tierd-") as path:
        yield Path(path)


@contextlib.contextmanager
def daemons_in(folder):
    """Starts daemons; at the end those that still run must have counted and stop well, and none a traceback written."""
    started = []

    def start(store, *options, **named):
        own = folder / f"d{len(started)}"
        own.mkdir(mode=0o700)
        daemon = Daemon(store, *options, folder=own, **named)
        started.append(daemon)
        return daemon.start()

    try:
        yield start
        for daemon in started:
            # One that a test has stopped in the middle of its work does not answer.
            if daemon.process.poll() is None:
                with contextlib.suppress(DaemonUnavailable):
                    daemon.check_sums()
    finally:
        codes = [daemon.stop() for daemon in started if daemon.process.poll() is None]
    logs = [daemon.log_path.read_text() for daemon in started]
    assert not any(codes), logs
    for log in logs:
        assert "Traceback" not in log
        assert "never retrieved" not in log


@pytest.fixture
def serve(folder):
    """Starts daemons for one test."""
    with daemons_in(folder) as start:
        yield start


@pytest.fixture(scope="module")
def serve_module():
    """Starts daemons that the tests of a module share."""
    with tempfile.TemporaryDirectory(prefix="tierd-") as path, daemons_in(Path(path)) as start:
        yield start


@pytest.fixture
def node(folder):
    """Starts compute nodes; none outlives the test."""
    started = []

    def start(store, *options, **named):
        one = Node(store.name if isinstance(store, Daemon) else store, *options, folder=folder, **named)
        started.append(one)
        return one

    yield start
    for one in started:
        one.end()


@pytest.fixture(scope="session")
def pattern_store(tmp_path_factory):
    """Four layers of sixteen experts; every byte tells where it belongs."""
    import numpy as np  # noqa: PLC0415

    path = tmp_path_factory.mktemp("pattern") / "store"
    dense = {"a": np.arange(700_000, dtype=np.float32), "b": np.arange(12, dtype=np.uint16).reshape(3, 4)}
    return make_store(
        path, layers=4, experts=16, top_k=2, fill="pattern", dense=dense, config={"model_type": "pattern"}
    )


@pytest.fixture(scope="session")
def big_records_store(tmp_path_factory):
    """Records below, at and above the size of a chunk."""
    path = tmp_path_factory.mktemp("big") / "store"
    return make_store(path, layers=len(RECORD_BYTES), experts=4, top_k=2, fill="pattern", record_bytes=RECORD_BYTES)


@pytest.fixture(scope="session")
def embedded_store(tmp_path_factory):
    """The embedded model, converted."""
    path = tmp_path_factory.mktemp("model") / "embedded"
    convert(embedded.path(), path, experts="int4-g64")
    return path


@pytest.fixture(scope="session")
def reference(embedded_store):
    """What the embedded model says to PROMPT, computed without a daemon: the event `done` of 64 tokens."""
    run = command(
        "compute_node", "generate", embedded_store, "--in-process",
        "-p", PROMPT, "--max-tokens", 64, "--ignore-eos", "--json",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)

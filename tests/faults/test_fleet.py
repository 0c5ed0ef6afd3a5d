"""A fleet on logical hosts of this machine: right answers under load, whatever of it is killed, and it heals."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from daemons import PROMPT, command, eventually

pytest.importorskip("ray", reason="needs Ray")

ANSWER_SECONDS = 100.0
SOAK_SECONDS = 180.0
HOSTS = {"a": {"store-a": 1, "node": 1}, "b": {"store-b": 1, "node": 1}}
WORKER = """
[[worker]]
name = "{name}"
store = "{daemon}"
on = {{ store-{name} = 1 }}
settings = {{ threads = 1 }}
"""
FILE = """
name = "tests"
ray = "{ray}"
{workers}
[[node]]
name = "far"
store = "ipv4:{daemons}"
workers = {names}
on = {{ node = 1 }}
replicas = {nodes}
settings = {{ threads = 1, context = 160, experts = "worker", store_cache = "0", model_name = ["tiny"] }}

[entrance]
http = "127.0.0.1:{port}"
on = {{ entrance = 1 }}
"""


class Fleet:
    """The fleet of `FILE`, told and seen through `fleet_hosts.py`, asked over HTTP.

    Args:
        folder: for its files.
        daemons: addresses by the name of the store, each with a worker beside it.
        nodes: how many.
    """

    def __init__(self, folder, daemons, nodes):
        self.folder = folder
        self.file = folder / "fleet.toml"
        self._hosts = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        workers = "".join(WORKER.format(name=name, daemon=daemon) for name, daemon in daemons.items())
        self._facts = {
            "workers": workers, "names": json.dumps([*daemons]), "daemons": ",".join(daemons.values()),
            "nodes": nodes, "port": port,
        }  # fmt: skip
        self.write("auto")

    def write(self, ray):
        """Its file, for a cluster at that address."""
        self.file.write_text(FILE.format(**self._facts, ray=ray))

    def start_hosts(self, first, others):
        """The cluster: resources of its first host, and names of others."""
        words = [sys.executable, str(Path(__file__).parents[1] / "fleet_hosts.py"), json.dumps(first), str(self.file)]
        with (self.folder / "hosts.log").open("wb") as log:
            self._hosts = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        self.write(self._answer()["ray"])
        for name in others:
            self.add(name)

    def processes(self):
        """All that the cluster has started, and the cluster."""
        return descendants(self._hosts.pid)

    def add(self, name):
        self.tell(f"add {name} {json.dumps(HOSTS[name])}")

    def tell(self, line):
        self._hosts.stdin.write(f"{line}\n")
        self._hosts.stdin.flush()
        return self._answer()

    def members(self):
        """Reports by name."""
        return {member["name"]: member for member in self.tell(f"status {self.file}")["members"]}

    def healed(self):
        """Wait until everything serves; reports by name."""
        found = self.tell(f"wait {self.file}")
        assert found["up"], found
        return {member["name"]: member for member in found["members"]}

    def kill(self, member):
        os.kill(self.members()[member]["pid"], signal.SIGKILL)

    def ask(self, client, conversation, tokens, *, stream=False):
        """A completion; status, node, and text or events."""
        body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        headers = {"x-conversation-id": conversation}
        return client.stream("POST", f"{self.url}/v1/completions", json=body, headers=headers)

    def end(self):
        if self._hosts is not None:
            self._hosts.stdin.close()
            try:
                self._hosts.wait(60)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._hosts.pid, signal.SIGKILL)
                self._hosts.stdout.close()

    def _answer(self):
        line = self._hosts.stdout.readline()
        assert line, (self.folder / "hosts.log").read_text()[-4000:]
        return json.loads(line)


@pytest.fixture
def start(tmp_path, serve_module, embedded_store, monkeypatch):
    """Starts a fleet."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with contextlib.ExitStack() as stack:

        def run(stores, nodes, first, others):
            daemons = {n: serve_module(embedded_store, "--arena", "50%", listen="127.0.0.1:0").name for n in stores}
            fleet = Fleet(tmp_path, daemons, nodes)
            stack.callback(fleet.end)
            fleet.start_hosts(first, others)
            return fleet

        yield run


@pytest.fixture
def fleet(start):
    """Two stores' workers and two nodes on two hosts, the entrance on a third one."""
    fleet = start("ab", 2, {"entrance": 1}, HOSTS)
    done = command("tierd", "fleet", "up", fleet.file, "--seconds", 90, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return fleet


class Load:
    """Clients that ask all the time, each in conversations of its own, and look at what they get."""

    def __init__(self, fleet, text):
        self.right = 0
        self.errors = []
        self.nodes = {}
        self._fleet = fleet
        self._text = text
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(3)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(ANSWER_SECONDS)
        assert not any(thread.is_alive() for thread in self._threads)

    def more(self, count=6):
        """Wait until so many more were answered rightly."""
        wanted = self.right + count
        eventually(lambda: self.right >= wanted or self.errors)

    def _run(self, number):
        with httpx.Client(timeout=ANSWER_SECONDS, trust_env=False) as client:
            turn = 0
            while not self._stop.is_set():
                turn += 1
                conversation, tokens = f"{number}-{turn % 4}", 2 + turn % 7
                try:
                    with self._fleet.ask(client, conversation, tokens) as answer:
                        self._judge(answer.status_code, answer.read(), tokens)
                        self.nodes.setdefault(conversation, []).append(answer.headers.get("x-tierd-node"))
                except httpx.HTTPError as error:
                    self.errors.append(repr(error))

    def _judge(self, status, body, tokens):
        told = json.loads(body)
        if status != 200:
            self.errors.append(told["error"]["message"])
        elif told["usage"]["completion_tokens"] == tokens and self._text.startswith(told["choices"][0]["text"]):
            self.right += 1
        else:
            self.errors.append(f"a wrong answer: {told}")


def stream_that_loses_its_node(fleet, conversation):
    """The texts that came, and the error at the end."""
    texts, errors = [], []
    with (
        httpx.Client(timeout=ANSWER_SECONDS, trust_env=False) as client,
        fleet.ask(client, conversation, 150, stream=True) as answer,
    ):
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            told = json.loads(line.removeprefix("data: "))  # no [DONE] comes
            if "error" in told:
                errors.append(told["error"]["message"])
                continue
            texts.append(told["choices"][0]["text"])
            if len(texts) == 3:
                fleet.kill(answer.headers["x-tierd-node"])
    return texts, errors


def strangers_can_reach(pids):
    """Sockets of these processes that listen on other addresses than loopback."""
    listing = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    return [
        line
        for line in listing.splitlines()
        if "127.0.0.1" not in line.split()[3] and any(f"pid={pid}," in line for pid in pids)
    ]


def descendants(pid):
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = dict(map(int, line.split()) for line in listing.splitlines())
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


@pytest.mark.soak
def test_on_one_host_a_worker_and_a_node_that_are_killed_cost_no_answer_and_come_back(start, reference):
    fleet = start("a", 1, {"entrance": 1, "store-a": 1, "node": 1}, [])
    told = fleet.tell(f"up {fleet.file}")
    assert told["up"], told
    assert strangers_can_reach(fleet.processes()) == []
    before = fleet.members()
    with Load(fleet, reference["text"]) as load:
        load.more()
        fleet.kill("a-0")
        texts, errors = stream_that_loses_its_node(fleet, "a stream")
        assert reference["text"].startswith("".join(texts)[:40])
        assert len(errors) == 1
        assert "was lost in the middle of this answer" in errors[0]
        # Where nothing of an answer had left, the node gives it when it is back.
        load.more()
        after = fleet.healed()
    assert load.errors == []
    assert all(after[name]["pid"] != before[name]["pid"] for name in ("a-0", "far-0"))
    fleet.tell(f"down {fleet.file}")
    assert not [member for member in after.values() if Path(f"/proc/{member['pid']}").exists()]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_fleet_answers_rightly_while_its_parts_are_killed_and_heals(fleet, reference):
    before = fleet.healed()
    assert strangers_can_reach(fleet.processes()) == []
    with Load(fleet, reference["text"]) as load:
        load.more(12)
        # Conversations stay with their nodes, and both nodes have some.
        assert load.errors == []
        assert all(len(set(nodes)) == 1 for nodes in load.nodes.values())
        assert {node for nodes in load.nodes.values() for node in nodes} == {"far-0", "far-1"}

        fleet.kill("a-0")
        load.more()
        texts, errors = stream_that_loses_its_node(fleet, "a stream")
        assert reference["text"].startswith("".join(texts)[:40])
        assert len(errors) == 1
        assert "was lost in the middle of this answer" in errors[0]
        load.more()
        healed = fleet.healed()
        assert healed["a-0"]["pid"] != before["a-0"]["pid"]
        assert sum(healed[node]["pid"] != before[node]["pid"] for node in ("far-0", "far-1")) == 1

        fleet.tell("kill b")
        load.more()
        eventually(lambda: fleet.members()["b-0"]["state"] == "unreachable")
        fleet.add("b")
        after = fleet.healed()
        assert after["b-0"]["pid"] != before["b-0"]["pid"]
        load.more()
    # Where nothing of an answer had left, another node gave it.
    assert load.errors == []
    pids = [member["pid"] for member in after.values()]
    fleet.tell(f"down {fleet.file}")
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_whatever_dies_at_random_every_answer_is_right_or_one_clear_error(fleet, reference):
    chance = random.Random(os.urandom(8))
    fleet.healed()
    killed = []
    with Load(fleet, reference["text"]) as load:
        until = time.monotonic() + SOAK_SECONDS
        while time.monotonic() < until:
            members = fleet.members()
            victim = chance.choice(["host b", *(name for name, found in members.items() if found["pid"])])
            killed.append(victim)
            if victim == "host b":
                fleet.tell("kill b")
                time.sleep(chance.uniform(0, 5))
                fleet.add("b")
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(members[victim]["pid"], chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP]))
            if chance.random() < 0.5:
                fleet.healed()
            time.sleep(chance.uniform(0, 3))
        fleet.healed()
        errors = list(load.errors)
        wanted = load.right + 12
        eventually(lambda: load.right >= wanted)
    known = ("no node of the fleet", "nodes died under this request", "did not answer within its time")
    assert not [error for error in errors if not any(words in error for words in known)], killed
    assert load.errors == errors
    assert load.right > len(killed)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_fleet_of_this_host_alone_lives_as_long_as_its_command(tmp_path, serve, embedded_store, reference):
    daemon = serve(embedded_store, "--arena", "50%", listen="127.0.0.1:0")
    fleet = Fleet(tmp_path, {"a": daemon.name}, 1)
    fleet.write("own")
    assert command("tierd", "fleet", "status", fleet.file).returncode == 1
    with (tmp_path / "up.log").open("wb") as log:
        up = subprocess.Popen(
            [sys.executable, "-m", "tierd", "fleet", "up", str(fleet.file), "--json"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        eventually(lambda: up.poll() is not None or b'"up": true' in (tmp_path / "up.log").read_bytes(), 200)
        assert up.poll() is None, (tmp_path / "up.log").read_text()
        assert command("tierd", "fleet", "up", fleet.file).returncode == 2
        told = json.loads(command("tierd", "fleet", "status", fleet.file, "--json").stdout)
        assert {member["state"] for member in told["members"]} == {"serving"}
        started = descendants(up.pid)
        assert strangers_can_reach(started) == []
        with httpx.Client(timeout=ANSWER_SECONDS, trust_env=False) as client, fleet.ask(client, "c", 9) as answer:
            assert reference["text"].startswith(json.loads(answer.read())["choices"][0]["text"])
        assert command("tierd", "fleet", "down", fleet.file).returncode == 0
        assert up.wait(100) == 0
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
    finally:
        up.kill()
        up.wait()

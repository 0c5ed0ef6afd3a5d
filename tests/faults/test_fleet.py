"""A fleet on logical hosts of this machine: right answers under load, whatever of it is killed, and it heals."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
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
from far import Certificates, token_file

pytest.importorskip("ray", reason="needs Ray")

ANSWER_SECONDS, SOAK_SECONDS, PAUSE_SECONDS = 200.0, 180.0, 0.1
CLIENTS, HOSTS = 3, {"a": {"store-a": 1, "node": 1}, "b": {"store-b": 1, "node": 1}}
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
patience = 150
{protection}
"""
PROTECTION = """
[protection]
tls_cert = "{tls.certificate}"
tls_key = "{tls.key}"
tls_ca = "{tls.ca}"
tls_name = "localhost"
token_file = "{token}"
"""


class Fleet:
    """The fleet of `FILE`, told and seen through `fleet_hosts.py`, asked over HTTP.

    Args:
        folder: for its files.
        first: resources of the first host of the cluster.
    """

    def __init__(self, folder, first):
        self.folder = folder
        self.file = folder / "fleet.toml"
        self.port = free_port()
        words = [sys.executable, str(Path(__file__).parents[1] / "fleet_hosts.py"), json.dumps(first)]
        with (folder / "hosts.log").open("wb") as log:
            self._hosts = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )

    def up(self, daemons, hosts=(), protection=""):
        """All of it, beside these daemons, by the name of the store, on these further hosts; reports by name."""
        ray = self._answer()["ray"]
        write_fleet(self.file, self.port, daemons, max(1, len(hosts)), ray, protection)
        self.tell(f"up {self.file}")
        for name in hosts:
            self.add(name)
        return self.healed()

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
        return serving(self.tell(f"wait {self.file}"))

    def end(self):
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


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ask(client, port, conversation, tokens, *, stream=False):
    """A completion, by the entrance."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    headers = {"x-conversation-id": conversation}
    return client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, headers=headers)


def write_fleet(file, port, daemons, nodes, ray, protection=""):
    """The file, for a cluster at that address."""
    workers = "".join(WORKER.format(name=name, daemon=daemon) for name, daemon in daemons.items())
    file.write_text(
        FILE.format(
            ray=ray, workers=workers, names=json.dumps([*daemons]), daemons=",".join(daemons.values()), nodes=nodes,
            port=port, protection=protection,
        )
    )  # fmt: skip


def serving(status):
    """Reports by name of a fleet that is up."""
    assert status["up"], status
    return {member["name"]: member for member in status["members"]}


@pytest.fixture
def start(tmp_path, serve, embedded_store, reference, monkeypatch):  # noqa: ARG001  # the reference comes first
    """Starts a fleet, its cluster while its daemons start; protected: by TLS and a token."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with contextlib.ExitStack() as stack:

        def run(stores, first, hosts=(), *, protected=False):
            fleet = Fleet(tmp_path, first)
            stack.callback(fleet.end)
            options, protection = ["--arena", "50%"], ""
            if protected:
                tls, token = Certificates(tmp_path), token_file(tmp_path / "token")
                options += ["--tls-cert", tls.certificate, "--tls-key", tls.key, "--token-file", token]
                protection = PROTECTION.format(tls=tls, token=token)
            daemons = {}
            for name in stores:
                local = ["--local", f"unix:{tmp_path}/{name}.sock"] * protected
                daemons[name] = serve(embedded_store, *options, *local, listen="127.0.0.1:0").name
            return fleet, fleet.up(daemons, hosts, protection)

        yield run


class Load:
    """Clients that ask all the time, each in conversations of its own, and look at what they get."""

    def __init__(self, fleet, text):
        self.right = 0
        self.errors = []
        self.nodes = {}
        self._fleet = fleet
        self._text = text
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)]

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
        eventually(lambda: self.right >= wanted or self.errors, ANSWER_SECONDS)

    def _run(self, number):
        with httpx.Client(timeout=ANSWER_SECONDS, trust_env=False) as client:
            turn = 0
            while not self._stop.wait(PAUSE_SECONDS):
                turn += 1
                conversation, tokens = f"{number}-{turn % 4}", 2 + turn % 7
                try:
                    with ask(client, self._fleet.port, conversation, tokens) as answer:
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


def kill(member):
    os.kill(member["pid"], signal.SIGKILL)


def stream_that_loses_its_node(fleet, members, text):
    """Ask for a stream and kill the node that gives it: what has come is right, and one clear error ends it."""
    texts, errors = [], []
    with (
        httpx.Client(timeout=ANSWER_SECONDS, trust_env=False) as client,
        ask(client, fleet.port, "a stream", 150, stream=True) as answer,
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
                kill(members[answer.headers["x-tierd-node"]])
    assert text.startswith("".join(texts)[:40])
    assert len(errors) == 1
    assert "was lost in the middle of this answer" in errors[0]


def gone(members):
    return not any(Path(f"/proc/{member['pid']}").exists() for member in members.values())


def strangers_can_reach(pids):
    """Sockets of these processes that listen on other addresses than loopback."""
    listing = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    return [
        line
        for line in listing.splitlines()
        if "127.0.0.1" not in line.split()[3] and any(f"pid={pid}," in line for pid in pids)
    ]


def descendants(pid):
    """The process and all that hang on it."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # one that has just ended
            parents[int(status.parent.name)] = int(re.search(r"^PPid:\s+(\d+)$", status.read_text(), re.MULTILINE)[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


@pytest.mark.timeout(600)
def test_a_fleet_of_three_hosts_answers_rightly_while_its_parts_are_killed_and_heals(start, reference):
    """Two stores' workers and two nodes on two hosts, the entrance on a third one; TLS and a token between them."""
    fleet, before = start("ab", {"entrance": 1}, HOSTS, protected=True)
    assert strangers_can_reach(fleet.processes()) == []
    with Load(fleet, reference["text"]) as load:
        load.more(12)
        # Conversations stay with their nodes, and both nodes have some.
        assert load.errors == []
        assert all(len(set(nodes)) == 1 for nodes in load.nodes.values())
        assert {node for nodes in load.nodes.values() for node in nodes} == {"far-0", "far-1"}

        kill(before["a-0"])
        stream_that_loses_its_node(fleet, before, reference["text"])
        load.more()
        healed = fleet.healed()
        assert healed["a-0"]["pid"] != before["a-0"]["pid"]
        assert sum(healed[node]["pid"] != before[node]["pid"] for node in ("far-0", "far-1")) == 1

        fleet.tell("kill b")
        load.more()
        eventually(lambda: fleet.members()["b-0"]["state"] == "unreachable")  # its actor outlives its host for a moment
        fleet.add("b")
        after = fleet.healed()
        assert after["b-0"]["pid"] != before["b-0"]["pid"]
        load.more()
    # Where nothing of an answer had left, another node gave it.
    assert load.errors == []


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_on_one_host_a_worker_and_a_node_that_are_killed_cost_no_answer_and_come_back(start, reference):
    fleet, before = start("a", {"entrance": 1, **HOSTS["a"]})
    assert strangers_can_reach(fleet.processes()) == []
    with Load(fleet, reference["text"]) as load:
        load.more()
        kill(before["a-0"])
        stream_that_loses_its_node(fleet, before, reference["text"])
        # Where nothing of an answer had left, the node gives it when it is back.
        load.more()
        after = fleet.healed()
    assert load.errors == []
    assert all(after[name]["pid"] != before[name]["pid"] for name in ("a-0", "far-0"))
    fleet.tell(f"down {fleet.file}")
    assert gone(after)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("protected", [False, True], ids=["plain", "tls"])
def test_whatever_dies_at_random_every_answer_is_right_or_one_clear_error(start, reference, protected):
    chance = random.Random(os.urandom(8))
    fleet, _ = start("ab", {"entrance": 1}, HOSTS, protected=protected)
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
    # What is there already stays, also where the command comes from another process.
    before = fleet.members()
    done = command("tierd", "fleet", "up", fleet.file, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    after = serving(json.loads(done.stdout))
    assert {name: member["pid"] for name, member in after.items()} == {n: m["pid"] for n, m in before.items()}
    fleet.tell(f"down {fleet.file}")
    assert gone(after)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_fleet_of_this_host_alone_lives_as_long_as_its_command(tmp_path, serve, embedded_store, reference):
    daemon = serve(embedded_store, "--arena", "50%", listen="127.0.0.1:0")
    file = tmp_path / "fleet.toml"
    port = free_port()
    write_fleet(file, port, {"a": daemon.name}, 1, "own")
    assert command("tierd", "fleet", "status", file).returncode == 1
    with (tmp_path / "up.log").open("wb") as log:
        up = subprocess.Popen(
            [sys.executable, "-m", "tierd", "fleet", "up", str(file), "--json"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        eventually(lambda: up.poll() is not None or b'"up": true' in (tmp_path / "up.log").read_bytes(), 200)
        assert up.poll() is None, (tmp_path / "up.log").read_text()
        assert command("tierd", "fleet", "up", file).returncode == 2
        told = json.loads(command("tierd", "fleet", "status", file, "--json").stdout)
        assert {member["state"] for member in told["members"]} == {"serving"}
        started = descendants(up.pid)
        assert strangers_can_reach(started) == []
        with httpx.Client(timeout=ANSWER_SECONDS, trust_env=False) as client, ask(client, port, "c", 9) as answer:
            assert reference["text"].startswith(json.loads(answer.read())["choices"][0]["text"])
        assert command("tierd", "fleet", "down", file).returncode == 0
        assert up.wait(100) == 0
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
    finally:
        up.kill()
        up.wait()

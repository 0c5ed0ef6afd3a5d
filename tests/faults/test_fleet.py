"""A fleet on three logical hosts: right answers under load, whatever of it is killed, and it heals."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from daemons import PROMPT, command, eventually

pytest.importorskip("ray", reason="needs Ray")

ANSWER_SECONDS = 100.0
HOSTS = {"a": {"store-a": 1, "node": 1}, "b": {"store-b": 1, "node": 1}}
FILE = """
name = "tests"
ray = "{ray}"

[[worker]]
name = "a"
store = "{a}"
on = {{ store-a = 1 }}
settings = {{ threads = 1 }}

[[worker]]
name = "b"
store = "{b}"
on = {{ store-b = 1 }}
settings = {{ threads = 1 }}

[[node]]
name = "far"
store = "ipv4:{a},{b}"
workers = ["a", "b"]
on = {{ node = 1 }}
replicas = 2
settings = {{ threads = 1, context = 160, experts = "worker", store_cache = "0", model_name = ["tiny"] }}

[entrance]
http = "127.0.0.1:{port}"
on = {{ entrance = 1 }}
"""


class Fleet:
    """The fleet of `FILE`, told and seen through `fleet_hosts.py`, asked over HTTP."""

    def __init__(self, folder, addresses):
        self.folder = folder
        self.file = folder / "fleet.toml"
        self._hosts = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.facts = {**addresses, "port": free.getsockname()[1], "ray": "auto"}
        self.url = f"http://127.0.0.1:{self.facts['port']}"

    def start_hosts(self):
        self.file.write_text(FILE.format(**self.facts))
        words = [sys.executable, str(Path(__file__).parents[1] / "fleet_hosts.py"), '{"entrance": 1}', str(self.file)]
        with (self.folder / "hosts.log").open("wb") as log:
            self._hosts = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        self.facts["ray"] = self._answer()["ray"]
        self.file.write_text(FILE.format(**self.facts))
        for name in HOSTS:
            self.add(name)

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
def fleet(tmp_path, serve_module, embedded_store, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    addresses = {}
    for name in HOSTS:
        folder = tmp_path / name
        folder.mkdir()
        daemon = serve_module(embedded_store, "--arena", "50%", listen="127.0.0.1:0")
        addresses[name] = daemon.name
    fleet = Fleet(tmp_path, addresses)
    try:
        fleet.start_hosts()
        done = command("tierd", "fleet", "up", fleet.file, "--seconds", 90, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        yield fleet
    finally:
        fleet.end()


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


def test_a_fleet_answers_rightly_while_its_parts_are_killed_and_heals(fleet, reference):
    before = fleet.healed()
    assert strangers_can_reach(descendants(fleet._hosts.pid)) == []
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

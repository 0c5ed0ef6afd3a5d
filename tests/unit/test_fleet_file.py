"""What a fleet's file may say, and what becomes of it: command lines, conversations, events."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from daemons import eventually

from compute_node.cli import build_app
from tierd.commands import fleet as fleet_command
from tierd.errors import DaemonUnavailable, UsageError
from tierd.fleet.conversation import conversation_key, rank_nodes
from tierd.fleet.fleet_file import read_fleet
from tierd.fleet.member import members_of
from tierd.fleet.own import find_own, keep_own, own_file
from tierd.fleet.passing import error_event, request_headers, response_headers, whole_events
from tierd.fleet.program import Program

FILE = """
name = "qwen3"
[[worker]]
name = "a"
store = "unix:/run/tierd/q.sock"
listen = "host:0"
on = { store-a = 1 }
settings = { threads = 8, tls_cert = "c.pem", tls_ca = "ca.pem", in_process = false, insecure = true }
[[node]]
name = "far"
store = "dns:///stores:9470"
workers = ["a"]
replicas = 2
settings = { model_name = ["q", "r"], context = 4096 }
"""


@pytest.fixture
def read(tmp_path):
    def run(text):
        path = tmp_path / "fleet.toml"
        path.write_text(text)
        return read_fleet(path)

    return run


def test_members_become_command_lines(read):
    worker, *nodes = members_of(read(FILE))
    assert [member.name for member in nodes] == ["far-0", "far-1"]
    assert worker.words("fd00::2", {})[2:] == [
        "compute_node", "worker", "unix:/run/tierd/q.sock", "--listen", "[fd00::2]:0",
        "--threads", "8", "--tls-cert", "c.pem", "--tls-ca", "ca.pem", "--insecure",
    ]  # fmt: skip
    assert (worker.on, worker.protected, worker.ca) == ({"store-a": 1.0}, True, "ca.pem")
    assert nodes[1].words("10.0.0.1", {"a-0": Path("/x/a-0")})[2:] == [
        "compute_node", "serve", "dns:///stores:9470", "--http", "127.0.0.1:0",
        "--model-name", "q", "--model-name", "r", "--context", "4096", "--worker", "@/x/a-0",
    ]  # fmt: skip
    assert len({member.digest for member in (worker, *nodes)}) == 3
    assert members_of(read(FILE.replace("8,", "9,", 1)))[0].digest != worker.digest


def test_what_protects_the_fleet_is_told_to_every_member_unless_it_has_its_own(read):
    protection = """
[protection]
tls_cert = "c"
tls_key = "k"
tls_ca = "a"
tls_name = "n"
token_file = "t"
"""
    own, _, far = members_of(read(FILE + protection))
    words = own.words("h", {})
    told = {words[number]: words[number + 1] for number in range(5, len(words) - 1)}
    # The worker's settings name files of their own.
    expected = {"--tls-cert": "c.pem", "--tls-key": "k", "--tls-ca": "ca.pem", "--tls-name": "n", "--token-file": "t"}
    assert expected.items() <= told.items()
    assert words.count("--tls-cert") == 1
    assert (own.protected, own.ca, own.ca_name) == (True, "ca.pem", "n")
    words = far.words("h", {"a-0": Path("/x/a-0")})
    assert words[5 : words.index("--model-name")] == [
        "--http",
        "127.0.0.1:0",
        "--tls-ca",
        "a",
        "--tls-name",
        "n",
        "--token-file",
        "t",
    ]
    assert not far.protected


def test_a_worker_that_asks_for_certificates_is_not_looked_at(read):
    worker, *_ = members_of(read(FILE.replace("in_process = false", 'tls_client_ca = "x.pem"')))
    assert (worker.protected, worker.ca) == (True, "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("replicas", "copies"), "copies"),
        (('["a"]', '["b"]'), "workers that are not there: b"),
        (('"far"', '"a"'), "a name of its own"),
        (("threads", "listen"), "'listen' is no setting"),
        (("threads", "--threads"), "'--threads' is no setting"),
        (("replicas = 2", "replicas = 0"), "node.0.replicas"),
        (('"host:0"', '"unix:/x"'), "worker.0.listen"),
        (('name = "qwen3"', 'name = "qwen3"\nray = "nowhere"'), "nowhere"),
        (('name = "qwen3"', 'name = "Qwen 3"'), "name"),
        (("[[node]]", '[entrance]\nhttp = "0.0.0.0:8000"\n[[node]]'), "insecure = true"),
        (("[[node]]", "[[nodes]]"), "node"),
        (("[[node]]", '[protection]\ntls_cert = "c"\n[[node]]'), "tls_cert and tls_key go together"),
        (("[[node]]", '[protection]\ntls_cert = "c"\ntls_key = "k"\n[[node]]'), "without tls_ca"),
        (("context", "["), "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_by_name(read, change, words):
    assert change[0] in FILE
    with pytest.raises(UsageError, match=r"fleet\.toml") as refused:
        read(FILE.replace(*change, 1))
    assert words in refused.value.message


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match="nothing"):
        read_fleet(tmp_path / "nothing.toml")


def test_without_ray_the_command_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="not installed") as refused:
        fleet_command.status(tmp_path / "fleet.toml")
    assert "[ray]" in refused.value.hint


def test_where_an_own_cluster_is_only_this_user_may_read(read, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "before")
    fleet = read(FILE)
    with pytest.raises(DaemonUnavailable, match="not up on this host"):
        find_own(fleet)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a token")
    keep_own(fleet, "127.0.0.1:1")
    assert own_file(fleet).stat().st_mode & 0o077 == 0
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    assert find_own(fleet) == "127.0.0.1:1"
    assert (os.environ["RAY_AUTH_TOKEN"], os.environ["RAY_AUTH_MODE"]) == ("a token", "token")
    own_file(fleet).write_text("[]")
    with pytest.raises(DaemonUnavailable):
        find_own(fleet)


def chat(*messages, **more):
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in messages], **more}).encode()


@pytest.mark.parametrize(
    ("first", "later", "other"),
    [
        (
            chat(("system", "s"), ("user", "a")),
            chat(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), temperature=1),
            chat(("system", "s"), ("user", "b")),
        ),
        (chat(("user", "a"), system="s"), chat(("user", "a"), ("user", "b"), system="s"), chat(("user", "a"))),
        (
            json.dumps({"prompt": "x" * 300}).encode(),
            json.dumps({"prompt": "x" * 400}).encode(),
            json.dumps({"prompt": "y" * 300}).encode(),
        ),
        (
            json.dumps({"prompt": list(range(90))}).encode(),
            json.dumps({"prompt": list(range(99))}).encode(),
            json.dumps({"prompt": [1, 2]}).encode(),
        ),
        (
            json.dumps({"prompt_cache_key": "k", "prompt": "x"}).encode(),
            json.dumps({"prompt_cache_key": "k", "prompt": "y"}).encode(),
            json.dumps({"prompt_cache_key": "l", "prompt": "x"}).encode(),
        ),
        (b"\xff", b"\xff", b"\xfe"),
        (b"", b"", b"{}"),
        (b"[" * 10000, b"[" * 10000, b"[1]"),
    ],
    ids=["chat", "system", "text", "tokens", "named", "no text", "nothing", "deep"],
)
def test_a_conversation_is_known_by_how_it_began(first, later, other):
    assert conversation_key({}, first) == conversation_key({}, later) != conversation_key({}, other)
    named = {"x-conversation-id": "one"}
    assert conversation_key(named, first) == conversation_key(named, other) != conversation_key({}, first)


def test_conversations_spread_over_nodes_and_only_a_lost_ones_own_move():
    names = [f"far-{number}" for number in range(5)]
    first = {key: rank_nodes(key, names)[0] for key in range(2000)}
    shares = [list(first.values()).count(name) for name in names]
    assert min(shares) > 300
    left = [name for name in names if name != "far-2"]
    assert all(rank_nodes(key, left)[0] == node for key, node in first.items() if node != "far-2")
    assert sorted(rank_nodes(1, names)) == names


async def test_events_pass_whole_or_not_at_all():
    async def chunks():
        for chunk in (b"data: 1\n", b"\ndata: 2\n\nda", b"ta: 3\n\n", b"data: "):
            yield chunk
        raise ConnectionError

    events = whole_events(chunks())
    assert [await anext(events), await anext(events)] == [b"data: 1\n\ndata: 2\n\n", b"data: 3\n\n"]
    with pytest.raises(ConnectionError):
        await anext(events)


def test_headers_of_one_connection_stay_there():
    given = [("host", "h"), ("connection", "close"), ("content-length", "3"), ("authorization", "Bearer k")]
    assert request_headers(given) == [("host", "h"), ("authorization", "Bearer k")]
    told = response_headers({"Content-Type": "x", "Transfer-Encoding": "chunked", "Retry-After": "1"}, "far-0")
    assert told == {"Content-Type": "x", "Retry-After": "1", "x-tierd-node": "far-0"}


def test_an_error_in_a_stream_has_the_form_of_its_api():
    assert error_event("/v1/completions", "m").startswith(b'data: {"error": {"message": "m"')
    assert error_event("/v1/messages", "m").startswith(b'event: error\ndata: {"type": "error"')


def test_a_program_is_heard_and_ended():
    script = "import time; print('listening on 127.0.0.1:7', flush=True); time.sleep(60)"
    program = Program([sys.executable, "-c", script])
    eventually(lambda: program.address)
    assert str(program.address) == "127.0.0.1:7"
    assert program.exit_code is None
    program.end(5)
    assert program.exit_code == -signal.SIGTERM
    refused = Program([sys.executable, "-c", "import sys; print('wrong option'); sys.exit(2)"])
    assert refused.wait(30) == 2
    assert (refused.last_words, refused.address) == ("wrong option", None)


def test_a_program_dies_with_the_process_that_started_it():
    script = (
        "import os, sys; from tierd.fleet.program import Program\n"
        "program = Program([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(program.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    eventually(lambda: not Path(f"/proc/{done.stdout.strip()}").exists())


@pytest.mark.parametrize("name", ["fleet.toml", "one-host.toml"])
def test_files_that_are_shipped_name_settings_that_exist(name):
    program = typer.main.get_command(build_app())
    members = members_of(read_fleet(Path(__file__).parents[2] / "deploy/ray" / name))
    assert len(members) >= 3
    for member in members:
        command, *words = member.words("10.0.0.1", {peer: Path("/x") / peer for peer in member.peers})[3:]
        given = program.commands[command].make_context(command, words).params
        assert given["store"] == member.store
        assert (given.get("worker") or []) == [f"@/x/{peer}" for peer in member.peers]

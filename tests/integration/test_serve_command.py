"""`compute-node serve` as the program that an operator starts and stops."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from compute_node import cli
from compute_node.server.metrics import reference_table

SECONDS = 1.0


def used(pid):
    """Processor seconds (proc(5): fields 14 and 15), private bytes and descriptors of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    anonymous = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds, int(anonymous[1]) << 10, len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_a_served_model_answers_rests_and_stops_after_its_answers(embedded_store, tmp_path):
    keys, config = tmp_path / "keys", tmp_path / "node.toml"
    keys.write_text("# team\nfirst-key\n\nsecond-key  # of the cron job\n")
    config.write_text(f'[api]\nhttp = "127.0.0.1:0"\napi_key_file = "{keys}"\n[node]\nmax_running = 2\ncontext = 256\n')
    command = [sys.executable, "-m", "compute_node", "serve", str(embedded_store), "--config", str(config)]
    environment = os.environ | {"TIERD_NODE_MODEL_NAME": "small, other"}
    words = tmp_path / "words"
    with (
        words.open("wb") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as child,
    ):
        try:
            line = child.stdout.readline()
            found = re.fullmatch(r"serving small, other on (http://127\.0\.0\.1:\d+)\n", line)
            assert found, words.read_text()
            with httpx.Client(base_url=found[1], timeout=60) as client:
                body = {"prompt": "It was", "max_tokens": 3}
                assert client.post("/v1/completions", json=body).status_code == 401
                for key in ("first-key", "second-key"):
                    given = {"Authorization": f"Bearer {key}"}
                    assert client.post("/v1/completions", json=body, headers=given).status_code == 200
                time.sleep(0.5)
                seconds, memory, descriptors = used(child.pid)
                time.sleep(SECONDS)
                seconds_later, memory_later, descriptors_later = used(child.pid)
                # A tenth leaves room for slow machines; a thread that spins takes all of it.
                assert seconds_later - seconds < 0.1 * SECONDS
                assert memory_later - memory < 1 << 20
                assert descriptors_later <= descriptors
                body = {"prompt": "It was", "max_tokens": 60, "stream": True, "ignore_eos": True}
                with client.stream("POST", "/v1/completions", json=body, headers=given) as answer:
                    lines = answer.iter_lines()
                    assert next(lines).startswith("data: ")
                    child.send_signal(signal.SIGTERM)
                    assert [line for line in lines if line][-1] == "data: [DONE]"
            assert child.wait(60) == 0
        finally:
            child.kill()
    assert "Traceback" not in words.read_text()


def test_servers_that_would_be_open_to_everyone_or_cannot_listen_are_refused(embedded_store, tmp_path, capsys):
    empty = tmp_path / "none"
    empty.write_text("# no key\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for options, why in (
            (["--http", "0.0.0.0:0"], "without an API key"),
            (["--http", "[::]:0"], "without an API key"),
            (["--http", "0.0.0.0:0", "--api-key", " "], "empty key"),
            (["--http", "0.0.0.0:0", "--api-key-file", str(empty)], "holds 0 keys"),
            (["--api-key-file", str(tmp_path / "missing"), "--http", "0.0.0.0:0"], "cannot be read"),
            (["--http", "unix:/x"], "HOST:PORT"),
            (["--max-connections", "0"], "max_connections"),
            (["--in-process", "--max-body", "much", "--http", "127.0.0.1:0"], "--max-body"),
            (["--in-process", "--http", f"127.0.0.1:{taken.getsockname()[1]}"], "cannot listen"),
        ):
            assert cli._run(["serve", str(embedded_store), *options]) == 2
            assert why in capsys.readouterr().err


def test_every_metric_is_documented(capsys):
    assert cli._run(["metrics", "--doc"]) == 0
    table = capsys.readouterr().out
    assert table == reference_table()
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 15
    assert all(re.fullmatch(r"\| `compute_node_[a-z_]+` \| \w+ \| (`\w+`(, )?)* ?\| .+ \|", row) for row in rows)
    assert "| `compute_node_requests_ended_total` | counter | `outcome` |" in table
    assert cli._run(["metrics"]) == 2


@pytest.mark.parametrize("host", ["localhost", "::1"])
def test_every_name_of_this_host_is_one(host):
    from compute_node.server.guard import HostNames  # noqa: PLC0415

    names = HostNames([], loopback=True)
    assert names.allow(f"[{host}]:80" if ":" in host else f"{host}:80")
    assert not names.allow("192.0.2.1")
    beyond = HostNames(["Chat.Example"], loopback=False)
    assert beyond.allow("192.0.2.1:8000")
    assert beyond.allow("chat.example")
    assert not beyond.allow("evil.example")

"""Looking into a running daemon from a terminal: its last seconds, and its figures as they change."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from daemons import command
from rich.console import Console
from sessions import RawSession

from tierd.api import admin_pb2 as pb
from tierd.client.daemon_stats import stats_object
from tierd.commands.top import view


@pytest.fixture(scope="module")
def daemon(serve_module, pattern_store):
    daemon = serve_module(pattern_store.path, "--arena", 4 * pattern_store.geometry.slot_bytes)
    raw = RawSession(daemon.address)
    raw.hello(name="busy")
    for turn in range(6):
        raw.acquire(turn % 4, [turn, turn + 1])
        raw.answers(2)
    yield daemon
    raw.close()


def test_a_dump_is_a_trace_of_requests_reads_and_evictions(daemon, tmp_path):
    file = tmp_path / "trace.json"
    run = command("tierd", "ctl", "dump", file, daemon.name)
    assert run.returncode == 0, run.stderr
    assert "events of the last" in run.stdout
    events = json.loads(file.read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert names.count("read") == daemon.stats()["requests"]["misses"] > 0
    assert sum(name.startswith("layer ") for name in names) == 6
    assert names.count("evict") == daemon.stats()["arena"]["evictions"] > 0
    for event in events:
        assert event["ph"] in {"M", "X", "i"}
        assert event["ph"] != "X" or event["dur"] >= 0


def test_a_dump_may_go_to_standard_output_but_not_anywhere(daemon, tmp_path):
    run = command("tierd", "ctl", "dump", "-", daemon.name, "--seconds", "5")
    assert json.loads(run.stdout)["displayTimeUnit"] == "ms"
    run = command("tierd", "ctl", "dump", tmp_path / "no" / "trace.json", daemon.name)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    run = command("tierd", "ctl", "dump", tmp_path / "trace.json", f"unix:{tmp_path}/nobody.sock")
    assert run.returncode == 1


def test_top_shows_rates_in_a_pipe_and_ends(daemon, tmp_path):
    run = command("tierd", "top", daemon.name, "--interval", "0.1", "--looks", "2")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("experts") == 2
    assert "drive nvme" in run.stdout
    assert "busy" in run.stdout
    run = command("tierd", "top", f"unix:{tmp_path}/nobody.sock")
    assert run.returncode == 1
    assert "Traceback" not in run.stderr


def test_a_view_tells_rates_since_the_last_look_and_survives_another_daemon():
    def stats(boot, requests, hits):
        arena = pb.Arena(slots=10, slots_ready=5, bytes=1000, evictions=requests)
        asked = pb.Requests(requests=requests, hits=hits, miss_wait_seconds=requests / 100)
        return stats_object(pb.GetStatsResponse(boot_id=boot, requests=asked, arena=arena))

    def shown(before, now, width=160):
        out = StringIO()
        Console(file=out, width=width).print(view("here", before, now, 2.0, width=width))
        return out.getvalue()

    text = shown(stats("a", 100, 50), stats("a", 300, 200))
    assert "100/s asked · 75 % in RAM" in text
    assert "waited 1.00 s/s" in text
    assert "5 of 10" in text
    assert "nobody asks" in shown(stats("a", 100, 50), stats("b", 30, 20))
    bars = [shown(stats("a", 100, 50), stats("a", 300, 200), width).count("█") for width in (20, 80, 160)]
    assert bars == [4, 9, 20]

"""`bench decode` on a tiny geometry, with a real daemon, a real store and a real probe."""

from __future__ import annotations

import json

import pytest
import typer

from compute_node.bench.decode_speed import _figures
from compute_node.bench.geometries import GEOMETRIES, BenchGeometry, geometry_named
from compute_node.commands import bench_decode

TINY = geometry_named("glm-5.2").config | {
    "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 2, "vocab_size": 2048,
    "num_hidden_layers": 8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _tiny(monkeypatch, tmp_path):
    monkeypatch.setitem(GEOMETRIES, "tiny", BenchGeometry("tiny", TINY))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def run(capsys, *arguments):
    app = typer.Typer()
    bench_decode.register(app)
    app(["--geometry", "tiny", "--layers", "3", "--experts", "16", *map(str, arguments)], standalone_mode=False)
    return capsys.readouterr().out


def test_decoding_from_the_drive_is_measured_on_both_sides(capsys, tmp_path):
    arguments = ("--rounds", "2", "--tokens", "5", "--threads", "1", "--json")
    found = json.loads(run(capsys, *arguments))
    assert (found["layers"], found["experts"]) == (3, 16)
    assert len(found["turns"]) == 2
    for turn in found["turns"]:
        assert sum(turn["outcomes"].values()) == 5 * 3 * 2
        assert turn["outcomes"]["miss"] + turn["outcomes"]["joined"] > 0
        assert turn["probe_bytes_per_second"] > 0
    assert 0 < found["hit_rate"] < 1
    assert found["projected_tokens_per_second"] == pytest.approx(found["tokens_per_second"] * 3 / 8)
    made = [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    again = run(capsys, *arguments[:-1])
    assert "share of the drive" in again
    stores = [path for path in sorted((tmp_path / "tierd" / "bench").rglob("*")) if path.is_file()]
    assert all(path.stat().st_mtime_ns in made for path in stores)


def test_decoding_with_hints_alternates_with_decoding_without_and_both_can_be_looked_at(capsys, tmp_path):
    arguments = ("--rounds", "2", "--tokens", "5", "--threads", "1", "--prefetch", "on", "--arena", "50%")
    found = json.loads(run(capsys, *arguments, "--timeline", tmp_path / "out.json", "--json"))
    plain = found["without_prefetch"]
    assert [len(found["turns"]), len(plain["turns"])] == [2, 2]
    assert found["prefetch_gain"] == pytest.approx(found["tokens_per_second"] / plain["tokens_per_second"])
    assert sum(turn["prefetched_bytes_used"] for turn in found["turns"]) % found["record_bytes"] == 0
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    by_track = {}
    for event in events:
        if event["ph"] == "X":
            by_track.setdefault(tracks[event["pid"], event["tid"]], []).append(event)
    assert len(by_track["turns"]) == 4
    assert {"native code", "experts", "waits", "looking ahead"} <= set(by_track)
    # What the daemon read stands on the node's line of time: within the turns.
    (drive,) = [track for track in by_track if track.startswith("drive ")]
    ends = max(event["ts"] + event["dur"] for event in by_track["turns"])
    assert any(0 <= event["ts"] <= ends for event in by_track[drive])


def test_figures_are_medians_of_both_sides():
    turns = [
        {"seconds": s, "outcomes": {"hit": 6, "miss": m, "joined": 1}, "wait_seconds": s / 2, "wait_by_outcome": {},
         "prefetched_bytes_used": 50, "probe_bytes_per_second": 1000.0}
        for s, m in ((1.0, 3), (2.0, 3), (4.0, 3))
    ]  # fmt: skip
    found = _figures(turns, 100, 8)
    assert found["drive_share"] == pytest.approx(450 / 2 / 1000)
    assert found["tokens_per_second"] == 4
    assert found["hit_rate"] == pytest.approx(0.6)
    assert found["wait_share"] == 0.5

"""What `bench decode` says of its limit, and how its store is made: once, with progress, where there is room."""

from __future__ import annotations

import json
import shutil

import pytest
import typer

from compute_node.bench import random_store as making
from compute_node.bench.decode_limit import decode_limit
from compute_node.bench.geometries import GEOMETRIES, BenchGeometry, geometry_named
from compute_node.bench.random_store import random_store
from compute_node.commands import bench_decode
from tierd.errors import UsageError

TINY = BenchGeometry(
    "tiny",
    geometry_named("glm-5.2").config | {
        "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 64, "num_experts": 15, "num_experts_per_tok": 2, "vocab_size": 512,
        "num_hidden_layers": 4,
    },
)  # fmt: skip


def turn(seconds, miss, probe=1000.0):
    outcomes = {"hit": 6, "miss": miss, "joined": 1}
    waits = {"hit": 0.0, "miss": seconds / 2, "joined": 0.1}
    return {
        "seconds": seconds, "outcomes": outcomes, "wait_seconds": seconds / 2, "wait_by_outcome": waits,
        "prefetched_bytes_used": 100, "probe_bytes_per_second": probe,
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(GEOMETRIES, "tiny", TINY)


def test_the_slower_of_drive_and_memory_is_the_limit():
    turns = [turn(1.0, 3), turn(2.0, 3), turn(4.0, 8)]
    sizes = {"tokens": 8, "record_bytes": 100}
    # 500 bytes at 1000 a second, and 1000 in the last turn.
    found = decode_limit(turns, **sizes, bytes_per_token=1, memory=1000.0)
    assert found == {"limit_tokens_per_second": 16.0, "limit_share": 0.25, "limit_by": "drive"}
    found = decode_limit(turns, **sizes, bytes_per_token=250, memory=1000.0)
    assert found == {"limit_tokens_per_second": 4.0, "limit_share": 1.0, "limit_by": "memory"}


@pytest.mark.parametrize("prefetch", ["off", "on"])
def test_the_command_says_the_limit_of_both_sides_and_the_waits_by_cause(monkeypatch, capsys, prefetch):
    side = {
        "turns": [turn(2.0, 3)], "tokens_per_second": 4.0, "drive_share": 0.25, "missed_bytes_per_second": 250.0,
        "probe_bytes_per_second": 1000.0, "hit_rate": 0.6, "wait_share": 0.5,
    }  # fmt: skip
    whole = {
        "projected_tokens_per_second": 0.2, "record_bytes": 100, "bytes_per_token": 1, "note": "", "void": False,
    }  # fmt: skip

    def measured(*_sizes, **_how):
        return side | whole | ({"without_prefetch": dict(side)} if prefetch == "on" else {})

    monkeypatch.setattr("compute_node.bench.decode_speed.measure_decode", measured)
    monkeypatch.setattr("compute_node.bench.memory_bandwidth.memory_bandwidth", lambda _threads: 1000.0)
    app = typer.Typer()
    bench_decode.register(app)
    arguments = ["--geometry", "tiny", "--layers", "1", "--experts", "4", "--tokens", "8", "--prefetch", prefetch]
    app([*arguments, "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    for one in filter(None, (found, found.get("without_prefetch"))):
        assert (one["limit_tokens_per_second"], one["limit_share"], one["limit_by"]) == (16.0, 0.25, "drive")
    app(arguments, standalone_mode=False)
    shown = capsys.readouterr().out
    for line in ("limit by the drive, tokens/s", "share of the limit", "miss 1.00, joined 0.10", "projected"):
        assert line in shown


def test_a_store_is_made_once_and_tells_how_far_it_is():
    lines = []
    store = random_store(TINY, layers=3, experts=15, tell=lines.append)
    assert store.geometry.experts_total == 45
    assert lines[-1].startswith("45 of 45 experts are written")
    assert 10 < len(lines) < 30
    lines.clear()
    assert random_store(TINY, layers=3, experts=15, tell=lines.append).fingerprint == store.fingerprint
    assert not lines


def test_without_room_nothing_is_made(monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(making.shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(UsageError, match=r"takes .*, .* has 1 kB left"):
        random_store(TINY, layers=3, experts=15)
    assert not list((tmp_path / "tierd" / "bench").iterdir())

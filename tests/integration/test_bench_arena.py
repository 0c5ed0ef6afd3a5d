"""The bench of the arena, on the embedded model: what it counts is right. What it times is for quiet machines."""

from __future__ import annotations

import shutil
from typing import NamedTuple

import pytest

from compute_node.bench.arena import measure_arena
from compute_node.bench.olmoe_store import olmoe_store
from tierd.errors import UsageError
from tierd.store.store import ExpertStore


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_residents_of_a_daemon_cost_no_message_and_both_sides_compute_the_same(embedded_store):
    lines = []
    report = measure_arena(ExpertStore.open(embedded_store), tokens=6, rounds=2, threads=1, progress=lines.append)
    assert lines[0] == "starting a daemon with room for all experts"
    assert report["rpcs_per_token"] == 0
    assert report["seconds_per_resident_expert"] > 0
    assert report["through_daemon_ratio"] > 0
    assert {name: len(speeds) for name, speeds in report["tokens_per_second"].items()} == {
        "through_daemon": 2,
        "in_process": 2,
        "in_process_4k": 2,
    }
    assert len(set(report["logits"])) == 2, "other tokens in each round"
    assert report["huge_page_share"]["in_process_4k"] == 0
    two = report["two_nodes"]
    assert 0 < two["unasked"] < two["requested"]
    assert two["messages"] > 0
    assert report["discard_share"] == two["discarded"] / two["unasked"]
    assert 0 <= report["other_cpu_share"] <= 1


@pytest.mark.parametrize("layers", [0, 17])
def test_a_store_of_other_layers_is_refused(layers):
    with pytest.raises(UsageError, match=f"--layers {layers} is outside 1 to 16"):
        olmoe_store(layers)


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(10**9, 10**9 - 10**8, 10**8))
    with pytest.raises(UsageError, match=r"takes 267 MB, .* has 100 MB left"):
        olmoe_store(1)
    assert list((tmp_path / "tierd" / "bench").iterdir()) == []

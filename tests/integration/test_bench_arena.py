"""The bench of the arena, on the embedded model: what it counts is right. What it times is for quiet machines."""

from __future__ import annotations

import shutil
from typing import NamedTuple

import numpy as np
import pytest

from compute_node.bench.arena import measure_arena
from compute_node.bench.geometries import BenchGeometry, geometry_named
from compute_node.bench.random_store import random_store
from compute_node.engine.model import Model, ModelOptions
from tierd.client.in_process import InProcess
from tierd.client.source import Phase
from tierd.errors import UsageError
from tierd.store.store import ExpertStore

OLMOE = geometry_named("olmoe-1b-7b")
TINY = BenchGeometry(
    "tiny", OLMOE.config | {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_experts": 8}
    | {"num_key_value_heads": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2, "vocab_size": 300},
)  # fmt: skip


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
    assert 0 <= report["foreign_cpu_share"] <= 1


def test_a_store_of_random_weights_is_made_once_and_computes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = random_store(TINY, layers=2)
    made = (store.path / "store.json").stat().st_mtime_ns
    assert store.path.name == "tiny-2x8-int4-g64"
    again = random_store(TINY, layers=2)
    assert (again.path / "store.json").stat().st_mtime_ns == made
    assert [path.name for path in store.path.parent.iterdir()] == [store.path.name]
    with Model(InProcess(again), ModelOptions(threads=1)) as model:
        logits = model.extend(model.cache.take(), [1, 2, 3], phase=Phase.PREFILL)
    assert np.isfinite(logits).all()
    assert len(set(logits[0].tolist())) > 100


@pytest.mark.parametrize("layers", [0, 17])
def test_a_store_of_layers_that_the_model_does_not_have_is_refused(layers):
    with pytest.raises(UsageError, match=f"--layers {layers} is outside 1 to 16"):
        random_store(OLMOE, layers=layers)


def test_an_unknown_format_is_refused():
    with pytest.raises(UsageError, match="unknown format 'int3'"):
        random_store(OLMOE, layers=1, experts_format="int3")


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(10**9, 10**9 - 10**8, 10**8))
    with pytest.raises(UsageError, match=r"takes 2\d\d MB, .* has 100 MB left"):
        random_store(OLMOE, layers=1)
    assert list((tmp_path / "tierd" / "bench").iterdir()) == []

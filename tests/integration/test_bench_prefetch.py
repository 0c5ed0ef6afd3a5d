"""`bench prefetch` on tiny sizes: every part of it runs, and its figures mean what they are called."""

from __future__ import annotations

import json

import numpy as np
import pytest
from inside import commands

from compute_node.bench import prefetch_speed
from compute_node.bench.geometries import GEOMETRIES, BenchGeometry, geometry_named
from compute_node.bench.prefetch_recall import measure_recall
from compute_node.commands import bench_prefetch
from compute_node.engine.model import Model, ModelOptions
from tierd.client.in_process import InProcess
from tierd.errors import UsageError
from tierd.store.store import ExpertStore

TINY = geometry_named("olmoe-1b-7b").config | {
    "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_experts": 16, "num_experts_per_tok": 2, "vocab_size": 512, "num_hidden_layers": 4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _tiny(monkeypatch, tmp_path):
    monkeypatch.setitem(GEOMETRIES, "tiny", BenchGeometry("tiny", TINY))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_runs_with_and_without_hints_are_compared_on_a_throttled_drive(monkeypatch):
    monkeypatch.setattr(prefetch_speed, "_SETTLING", 1)
    run = commands(bench_prefetch)(
        "--no-recall", "--no-embedded", "--geometry", "tiny", "--layers", 3, "--tokens", 6, "--rounds", 2,
        "--cases", "1", "--json",
    )  # fmt: skip
    found = json.loads(run.stdout)
    assert set(found["speedup"]) == set(found["hidden_share"]) == {"1"}
    assert found["worst_case_ratio"] is None
    (case,) = found["cases"].values()
    off, on = case["off_seconds_per_token"], case["on_seconds_per_token"]
    assert len(off) == len(on) == 2
    assert found["speedup"]["1"] == pytest.approx(np.median(off) / np.median(on))
    assert sum(case["hinted"].values()) > 0
    assert found["reads_per_second_possible"] > 0


def test_an_unknown_case_is_refused_before_anything_is_made():
    with pytest.raises(UsageError, match="'3'"):
        commands(bench_prefetch)("--no-recall", "--cases", "1,3")


def test_guesses_of_the_next_layers_are_better_than_those_of_the_next_token(embedded_store):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 200, 40) for _ in range(3)]
    with Model(InProcess(ExpertStore.open(embedded_store)), ModelOptions(context=40, threads=1)) as model:
        found = measure_recall(model, texts[:2], texts[2:], residency=0.25, tell=lambda _line: None)
    report, foreseen = found.report, found.foreseen
    assert report["wasted_per_useful_byte"] <= report["baseline_wasted_per_useful_byte"]
    assert 0 < report["baseline_recall_on_misses"] < 1
    assert set(report["curves_by_layer"]) == set(range(8))
    assert sum(foreseen.next_layer.right) > sum(foreseen.next_step.right) > 0

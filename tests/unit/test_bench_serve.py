"""`bench serve` on tiny sizes: what clients hear is checked, and mistakes would be counted."""

from __future__ import annotations

import json

import pytest
import typer

from compute_node.bench import client_load, serve_speed
from compute_node.bench.geometries import GEOMETRIES, BenchGeometry, geometry_named
from compute_node.bench.random_model import RandomModel
from compute_node.bench.serve_speed import measure_serving
from compute_node.commands import bench_serve
from compute_node.engine.model import Model, ModelOptions
from tierd.client.in_process import InProcess

TINY = geometry_named("olmoe-1b-7b").config | {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512, "num_hidden_layers": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(GEOMETRIES, "tiny", BenchGeometry("tiny", TINY))
    monkeypatch.setattr(client_load, "_WARM_SECONDS", 0.05)


def run(capsys, *arguments):
    app = typer.Typer()
    bench_serve.register(app)
    app(["--geometry", "tiny", "--layers", "2", "--tokens", "6", *arguments], standalone_mode=False)
    return capsys.readouterr().out


def test_all_figures_of_the_contract_are_there_and_no_answer_is_wrong(capsys):
    found = json.loads(run(capsys, "--clients", "1", "--clients", "16", "--seconds", "0.4", "--no-embedded", "--json"))
    for name in ("tokens_per_second", "ttft_p50", "ttft_p99", "tpot_p50"):
        assert set(found[name]) == {"1", "16"}
        assert all(value > 0 for value in found[name].values())
    for name in ("aggregate_ratio_16_to_1", "one_client_share_of_step", "sixteen_share_of_step"):
        assert found[name] > 0
    assert (found["errors"], found["crossed_answers"], found["places_free_at_the_end"]) == (0, 0, True)
    assert sum(found["answers"].values()) > 10
    assert sum(found["left_midway"].values()) > 0
    assert found["rows_per_step"]["16"] > 2 * found["rows_per_step"]["1"] > 0


def test_the_embedded_model_is_served_too_also_over_http_and_people_get_tables(capsys):
    shown = run(capsys, "--clients", "2", "--seconds", "0.2", "--http")
    assert "tiny, 2 layers" in shown
    assert shown.count("embedded model") == 2
    assert "embedded model over HTTP" in shown
    assert shown.count("errors 0, answers mixed up or changed 0") == 3


def test_an_answer_that_is_anothers_is_counted(monkeypatch):
    crowd = serve_speed.run_bare_steps

    def mixed(model, prompts, tokens):
        steps = crowd(model, prompts, tokens)
        if len(prompts) > 1:
            steps.answers.reverse()
        return steps

    monkeypatch.setattr(serve_speed, "run_bare_steps", mixed)
    options = ModelOptions(context=64, sequences=2, rows=32, threads=1)
    with Model(InProcess(RandomModel(TINY)), options) as model:
        found, _ = measure_serving(model, clients=[2], seconds=0.2, tokens=4, tell=lambda _: None)
    assert found["crossed_answers"] > 2

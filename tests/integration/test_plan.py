"""`tierd plan`: the figures of stores and checkpoints, and what a trace predicts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from daemons import command
from typer.testing import CliRunner

from tierd.checkpoint.convert import convert
from tierd.checkpoint.outlook import look_ahead
from tierd.cli import build_app
from tierd.errors import StoreDamaged, UnsupportedModel, UsageError
from tierd.store.formats import DenseFormat
from tierd.store.store import ExpertStore
from tierd.store.synthetic import make_store

ORACLES = Path(__file__).parent.parent / "oracles"


def run(*arguments):
    return CliRunner().invoke(build_app("plan"), ["plan", *map(str, arguments)])


def planned(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two layers with records of different sizes."""
    return make_store(
        tmp_path_factory.mktemp("plan") / "store", layers=2, experts=8, top_k=2, fill="sparse",
        record_bytes=(1 << 20, 2 << 20), dense={"d": np.zeros(1000, np.float32)},
    )  # fmt: skip


def test_a_store_is_told_with_its_waste_and_the_bytes_of_a_token(store):
    answer = planned(store.path)
    figures = answer["formats"]["bf16"]
    assert figures == {
        "expert_bytes": 24 << 20, "slot_bytes": 2 << 20, "wasted_bytes": 8 << 20, "token_bytes": 6 << 20,
    }  # fmt: skip
    assert (answer["experts"], answer["top_k"], answer["dense"]) == (16, 2, {"f32": 4000})


def test_the_sum_of_the_memory_is_explained(store):
    ram = planned(store.path, "--ram", "120MiB")["ram"]
    assert ram["bytes"] == 120 << 20
    assert sum(item["bytes"] for item in ram["items"]) <= ram["bytes"]
    assert 0 < ram["slots"] < 16
    told = run(store.path, "--ram", "auto").stdout
    for word in ("available", "reserve", "interpreter", "slots", "slack", "100 %"):
        assert word in told


def test_sizes_rise_to_the_whole_model(store):
    sizes = planned(store.path)["sizes"]
    assert [size["slots"] for size in sizes] == sorted({size["slots"] for size in sizes})
    assert sizes[-1]["share"] == 1.0
    assert sizes[0]["hit_rate"] is None


def test_a_budget_below_the_minimum_is_refused_with_the_figure(store):
    result = run(store.path, "--ram", "5MiB")
    assert isinstance(result.exception, UsageError)
    assert "at least" in str(result.exception)


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "qwen3_moe", "qwen3_moe_tied"])
def test_the_config_alone_says_what_a_conversion_writes(family, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_bytes((ORACLES / family / "config.json").read_bytes())
    outlook = look_ahead(tmp_path / "config")
    for fmt, geometry in outlook.geometry.items():
        convert(ORACLES / family, tmp_path / fmt, experts=fmt, dense="f32")
        made = ExpertStore.open(tmp_path / fmt)
        assert (made.geometry.expert_bytes, made.geometry.top_k) == (geometry.expert_bytes, geometry.top_k)
    assert outlook.dense_bytes[DenseFormat.F32] == made.manifest.dense_bytes


@pytest.mark.parametrize(
    ("folder", "native"), [("deepseek_v3_fp8", "fp8-e4m3"), ("gpt_oss_mxfp4", "mxfp4"), ("kimi_k2_int4", "int4-g32")]
)
def test_a_checkpoint_in_codes_is_planned_as_it_is_published(folder, native, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_bytes((ORACLES / folder / "config.json").read_bytes())
    answer = planned(tmp_path / "config")
    assert answer["disk"]["format"] == native
    assert set(answer["formats"]) == {native, "f32", "bf16", "int8", "int4-g64"}
    for fmt, figures in answer["formats"].items():
        convert(ORACLES / folder, tmp_path / fmt, experts="native" if fmt == native else fmt)
        assert ExpertStore.open(tmp_path / fmt).geometry.expert_bytes == figures["expert_bytes"]
    refused = run(tmp_path / "config", "--experts", "mxfp4" if native != "mxfp4" else "fp8-e4m3")
    assert "is not published in that format" in str(refused.exception)


def test_a_checkpoint_is_told_with_the_disk_that_it_needs(tmp_path, monkeypatch):
    answer = planned(ORACLES / "olmoe", "--dst", tmp_path / "not" / "there", "--experts", "f32")
    assert set(answer["formats"]) == {"f32", "bf16", "int8", "int4-g64"}
    assert (answer["disk"]["format"], answer["disk"]["at"]) == ("f32", str(tmp_path))
    assert answer["disk"]["needed_bytes"] > answer["formats"]["f32"]["expert_bytes"]
    monkeypatch.setattr("tierd.commands.plan.shutil.disk_usage", lambda _: type("U", (), {"free": 10}))
    told = run(ORACLES / "olmoe").stdout
    assert "Short of" in told
    assert "--consume" in told


def test_what_is_neither_is_refused(tmp_path):
    assert isinstance(run(tmp_path).exception, UsageError)
    (tmp_path / "config.json").write_text("{")
    assert isinstance(run(tmp_path).exception, StoreDamaged)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert isinstance(run(tmp_path).exception, UnsupportedModel)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Forty tokens that use two experts of each layer again and again, and now and then two others."""
    experts = np.zeros((40, 2, 2), np.uint8)
    experts[:, :, 1] = 1
    experts[::5] += 4
    path = tmp_path_factory.mktemp("trace") / "trace.npz"
    np.savez(
        path, tokens=np.arange(40) % 5, experts=experts, steps=np.arange(40), prefill=np.zeros(40, bool),
        sequences=np.zeros(40, int), layers=[0, 1], layer_experts=[8, 8], expert_bytes=0,
    )  # fmt: skip
    return path


def test_a_trace_predicts_hit_rates_that_rise_with_memory(store, trace):
    answer = planned(store.path, "--trace", trace)
    rates = [size["hit_rate"] for size in answer["sizes"]]
    assert rates == sorted(rates)
    # Eight experts are used 160 times; with all in RAM each is read once.
    assert rates[-1] == pytest.approx(1 - 8 / 160)
    assert answer["sizes"][-1]["read_bytes"] == pytest.approx(8 * 1.5 * (1 << 20) / 40)
    assert answer["bandwidth"] is None or answer["sizes"][-1]["tokens_per_second"] > 0
    assert "your text decides" in run(store.path, "--trace", trace).stdout


@pytest.fixture(scope="module")
def drive(tmp_path_factory):
    """A store that is large enough to measure its drive: 32 records of 1 MiB."""
    return make_store(
        tmp_path_factory.mktemp("drive") / "store", layers=2, experts=8, top_k=2, fill="pattern", record_bytes=1 << 20
    )


def measured(path, store, slots, seconds):
    """A run of 20 decode steps."""
    path.write_text(
        json.dumps(
            {
                "token_ids": list(range(21)),
                "arena_slots": slots,
                "fingerprint": store.fingerprint,
                "decode": {"seconds": 20 * seconds, "wait_seconds": 10 * seconds},
            }
        )
    )
    return path


def test_measured_runs_predict_the_speed_at_every_size_and_with_another_drive(drive, trace, tmp_path, monkeypatch):
    monkeypatch.setenv("TIERD_DRIVE_THREADS", "4")
    runs = [measured(tmp_path / f"{slots}", drive, slots, seconds) for slots, seconds in ((4, 5.0), (16, 4.0))]
    answer = planned(drive.path, "--trace", trace, "--measured", runs[0], "--measured", runs[1])
    assert answer["drives"] == 1, "it is measured although threads are given"
    speeds = {size["slots"]: size["tokens_per_second"] for size in answer["sizes"]}
    assert speeds[16] == pytest.approx(1 / 4.0, rel=1e-3), "what was measured is predicted"
    assert speeds[4] == pytest.approx(1 / 5.0, rel=1e-3)
    assert [*speeds.values()] == sorted(speeds.values())
    for size in answer["sizes"]:
        assert size["tokens_per_second_with_another_drive"] >= size["tokens_per_second"]
    told = run(drive.path, "--trace", trace, "--measured", runs[0]).stdout
    assert "a step computes for" in told
    assert "+1 drive" in told


def test_warnings_do_not_get_into_the_answer(drive, trace, tmp_path, monkeypatch):
    (tmp_path / "plan.toml").write_text("[[throttle]]\nbytes_per_second = 1e8\n")
    monkeypatch.setenv("TIERD_FAULT_PLAN", str(tmp_path / "plan.toml"))
    done = command("tierd", "plan", drive.path, "--trace", trace, "--json")
    assert 0.5e8 < json.loads(done.stdout)["bandwidth"] < 1.1e8
    assert "FAULT PLAN" in done.stderr


def test_measured_runs_need_a_trace_and_a_store(drive, trace, tmp_path):
    path = measured(tmp_path / "r", drive, 4, 1.0)
    assert "--trace" in str(run(drive.path, "--measured", path).exception)
    arguments = (ORACLES / "olmoe", "--trace", trace, "--measured", path)
    assert "not with a checkpoint" in str(run(*arguments).exception)


def test_a_trace_of_another_model_is_refused(trace, tmp_path):
    other = make_store(tmp_path / "other", layers=2, experts=9, top_k=2, fill="sparse")
    assert "not those of the model" in str(run(other.path, "--trace", trace).exception)

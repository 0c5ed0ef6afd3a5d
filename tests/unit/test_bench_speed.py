"""Measurements on tiny sizes: what they compute must be right, however fast."""

from __future__ import annotations

import json

import numpy as np
import pytest
import typer

from compute_node import embedded
from compute_node.bench.geometries import GEOMETRIES, BenchGeometry, geometry_named
from compute_node.bench.kernel_speed import CASES
from compute_node.bench.plain_read import plain_read
from compute_node.bench.quiet import Quiet, alternating
from compute_node.bench.random_model import RandomModel, dense_shapes
from compute_node.commands import bench_speed
from compute_node.engine.executor import Executor
from compute_node.engine.model import Model, ModelOptions
from compute_node.models.registry import family_of
from tierd.client.in_process import InProcess
from tierd.client.source import Phase
from tierd.errors import LimitExceeded, UsageError
from tierd.store.reading import huge_page_buffer

TINY = geometry_named("olmoe-1b-7b").config | {
    "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512, "num_hidden_layers": 4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setitem(GEOMETRIES, "tiny", BenchGeometry("tiny", TINY))


def group():
    app = typer.Typer()
    bench_speed.register(app)
    return app


def run(capsys, *arguments):
    group()(list(arguments), standalone_mode=False)
    return json.loads(capsys.readouterr().out)


def test_plain_reading_reads_every_byte():
    data = huge_page_buffer(1 << 20)
    data.view(np.int64)[:] = np.arange(1 << 17)
    segment, sums = plain_read(data)
    with Executor(3) as executor:
        executor.run(segment)
    assert sums.sum() == np.arange(1 << 17).sum()
    assert data.ctypes.data % (2 << 20) == 0


def test_every_geometry_is_one_that_a_family_reads():
    for geometry in GEOMETRIES.values():
        _, sizes = family_of(geometry.config)
        assert sizes.layers == geometry.layers
        assert geometry.cut(None)["vocab_size"] == sizes.vocab_size


def test_the_embedded_models_sizes_are_its_own():
    published = json.loads((embedded.path() / "config.json").read_text())
    assert geometry_named("embedded").config.items() <= published.items()


def test_matrices_are_larger_than_the_caches(capsys, monkeypatch):
    wanted = []

    def measured(*, matrix_bytes, **_how):
        wanted.append(matrix_bytes)
        return [], {"void": False}

    monkeypatch.setattr("compute_node.bench.kernel_speed.measure_kernels", measured)
    for cached in (0, 32 << 20, 256 << 20):
        monkeypatch.setattr("compute_node.bench.memory_bandwidth.cache_bytes", lambda found=cached: found)
        assert run(capsys, "kernels", "--json")["cache_bytes"] == cached
    assert wanted == [300 << 20, 300 << 20, 2 << 30]


def test_a_part_of_a_geometry_keeps_the_shares():
    config = geometry_named("glm-5.2").cut(4, experts=128)
    assert (config["num_hidden_layers"], config["num_experts"], config["vocab_size"]) == (4, 128, 154880 * 4 // 76)
    for bad in ({"layers": 0}, {"layers": 77}, {"layers": 4, "experts": 7}, {"layers": 4, "experts": 257}):
        with pytest.raises(UsageError):
            geometry_named("glm-5.2").cut(**bad)
    with pytest.raises(UsageError, match="Known: olmoe"):
        raise_with_hint("x")


def raise_with_hint(name):
    try:
        geometry_named(name)
    except UsageError as error:
        raise UsageError(error.hint) from error


def test_a_random_model_has_the_tensors_of_its_family_and_stays_finite():
    shapes = dense_shapes(TINY)
    assert shapes["model.layers.3.self_attn.q_proj.weight"] == (128, 128)
    assert shapes["model.norm.weight"] == (128,)
    random = RandomModel(TINY)
    attention, head = 4 * 4 * (128 * 128 + 4 * 128), 512 * 128 + 4 * 512
    router, norms = 4 * (8 * 128 + 4 * 8), 4 * (4 * 4 * 128 + 128)
    assert random.dense_bytes_of_a_token == attention + head + router + norms
    assert random.expert_bytes_of_a_token == 4 * 2 * (2 * 64 * (64 + 4) + 128 * (64 + 4))
    with Model(InProcess(random), ModelOptions(numerics="fast", context=16, threads=1)) as model:
        logits = model.extend(model.cache.take(), [1, 2, 3], phase=Phase.PREFILL, logits_of=range(3))
    assert np.isfinite(logits).all()
    assert 0.05 < logits.std() < 20


@pytest.mark.parametrize("experts", ["int8", "bf16", "fp8-e4m3", "mxfp4", "int4-g32"])
def test_other_expert_formats_stay_finite(experts):
    with Model(InProcess(RandomModel(TINY, experts=experts)), ModelOptions(context=16, threads=1)) as model:
        assert np.isfinite(model.extend(model.cache.take(), [1, 2], phase=Phase.PREFILL)).all()


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "gpt-oss-120b"])
def test_random_models_of_other_layers_stay_finite(name):
    geometry = geometry_named(name)
    small = {"hidden_size": 64, "vocab_size": 256, "num_attention_heads": 8, "intermediate_size": 64}
    small |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64} if "next" in name else {}
    config = geometry.cut(4, experts=12) | small
    with Model(InProcess(RandomModel(config)), ModelOptions(numerics="fast", context=64, threads=1)) as model:
        logits = model.extend(model.cache.take(), list(range(20)), phase=Phase.PREFILL, logits_of=range(20))
    assert np.isfinite(logits).all()
    assert 0.05 < logits.std() < 20


@pytest.mark.parametrize("experts", ["int4-g64", "int8"])
def test_tokens_of_a_random_model_choose_experts_of_their_own(experts):
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 32, "num_hidden_layers": 8}
    seen = []
    with Model(InProcess(RandomModel(TINY | sizes, experts=experts)), ModelOptions(context=128, rows=128)) as model:
        tokens = np.random.default_rng(1).integers(0, 512, 120).tolist()
        model.extend(
            model.cache.take(),
            tokens,
            phase=Phase.PREFILL,
            observe=lambda _layer, routes, _w: seen.append(routes.copy()),
        )
    for routes in seen:
        uses = np.bincount(routes.ravel(), minlength=32)
        assert uses.max() < 0.3 * len(tokens), "a sixteenth of the tokens would be an expert's even share"


def test_random_experts_in_float32_are_refused():
    with pytest.raises(LimitExceeded, match="random experts"):
        RandomModel(TINY, experts="f32").read_record(0, 0)


def test_sides_alternate_after_one_round_that_does_not_count():
    order = []
    found = alternating(2, lambda: order.append("a"), lambda: order.append("b"))
    assert order == ["a", "b"] * 3
    assert [len(side) for side in found] == [2, 2]


def test_the_time_of_others_is_a_share():
    with Quiet() as quiet:
        sum(range(200_000))
    assert quiet.foreign >= 0
    assert quiet.report()["void"] in {True, False}


def test_kernels_report_their_shares_and_both_raw_sides(capsys):
    found = run(capsys, "kernels", "--json", "--matrix-mib", "1", "--read-mib", "1", "--rounds", "2", "--cols", "200")
    for key in ("int4_g64_share", "int8_share", "bf16_share", "int4_g64_exact_share"):
        assert found[key] > 0
    assert [(case["format"], case["numerics"]) for case in found["cases"]] == list(CASES)
    for case in found["cases"]:
        assert len(case["kernel_seconds"]) == len(case["read_seconds"]) == 2
        assert 0.9e6 < case["matrix_bytes"] < 1.35e6


def test_a_step_is_measured_and_its_ways_agree(capsys):
    found = run(
        capsys, "step", "--geometry", "tiny", "--layers", "2", "--rounds", "2", "--tokens", "3", "--read-mib", "1",
        "--json",
    )  # fmt: skip
    assert found["same_logits"] is True
    assert found["layers"] == 2
    assert found["bandwidth_share"] > 0
    assert len(found["fused_seconds"]) == len(found["op_by_op_seconds"]) == 2
    assert 0 < found["python_seconds_per_token"] < max(found["fused_seconds"])


def test_costs_are_tabled_by_length_and_number_of_texts_with_the_bytes_that_move(capsys):
    sizes = ("--contexts", "70", "--contexts", "3", "--batches", "2", "--batches", "1", "--layers", "2")
    few = ("--rounds", "2", "--steps", "3", "--read-mib", "1", "--json")
    found = run(capsys, "costs", "--geometry", "tiny", *sizes, *few)
    cells = {(cell["context"], cell["batch"]): cell for cell in found["cells"]}
    assert list(cells) == [(3, 1), (3, 2), (70, 1), (70, 2)]
    random = RandomModel(geometry_named("tiny").cut(2))
    one = random.dense_bytes_of_a_token + random.expert_bytes_of_a_token
    kept = 2 * 2 * 128 * 4  # keys and values of a token in two layers
    assert cells[3, 1]["bytes_per_step"] == one + 3 * kept
    assert cells[70, 1]["bytes_per_step"] == one + 70 * kept
    more = cells[70, 2]["bytes_per_step"] - one - 140 * kept
    assert 0 <= more <= random.expert_bytes_of_a_token, "two texts share some experts, or none"
    for cell in cells.values():
        assert len(cell["step_seconds"]) == len(cell["read_bytes_per_second"]) == 2
        assert cell["seconds_per_token"] == cell["seconds_per_step"] / cell["batch"]
        assert cell["share_of_limit"] > 0


def test_prefill_is_measured(capsys):
    found = run(capsys, "prefill", "--geometry", "tiny", "--rows", "7", "--tokens", "20", "--rounds", "2", "--json")
    assert found["tokens_per_second"] == pytest.approx(20 / np.median(found["seconds"]))


def test_unknown_names_are_refused():
    app = group()
    for arguments in (["step", "--geometry", "huge"], ["step", "--geometry", "tiny", "--experts-format", "f32"]):
        with pytest.raises(UsageError, match="not known"):
            app(arguments, standalone_mode=False)

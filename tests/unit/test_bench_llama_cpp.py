"""The other side of the comparison: what the file says, and what is said where the packages are missing."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import typer

from compute_node.bench import llama_cpp
from compute_node.bench.geometries import geometry_named
from compute_node.bench.gguf_file import byte_tokens, q4_blocks, q8_blocks, write_gguf
from compute_node.bench.random_model import RandomModel
from compute_node.commands import bench_llama_cpp
from compute_node.kernels import Matrix, dequantise
from tierd.errors import LimitExceeded, UsageError

TINY = geometry_named("olmoe-1b-7b").config | {
    "hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 320, "num_hidden_layers": 2,
}  # fmt: skip
MIXTRAL = geometry_named("mixtral-8x7b").config | {
    "hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 320,
    "num_hidden_layers": 1,
}  # fmt: skip


def test_every_byte_has_a_character_of_its_own():
    assert len(set(byte_tokens())) == 256
    assert byte_tokens()[ord("a")] == "a"
    assert byte_tokens()[ord(" ")] == "\u0120"


def test_blocks_of_four_bits_hold_the_same_weights():
    generator = np.random.default_rng(1)
    packed = generator.integers(0, 256, (5, 128), np.uint8)
    scales = generator.random((5, 4)).astype(np.float16)
    blocks = q4_blocks(packed, scales, 256).reshape(5, 8, 18)
    # As llama.cpp reads them: a half-precision scale, then sixteen bytes of low halves before high ones.
    wide = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    codes = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=2).astype(np.float32) - 8
    matrix = Matrix("int4-g64", 5, 256, packed, scales)
    assert np.array_equal((codes * wide).reshape(5, 256), dequantise(matrix))


def test_blocks_of_eight_bits_hold_the_same_weights():
    codes = np.random.default_rng(2).integers(-128, 128, (3, 64), np.int8)
    scales = np.array([0.5, 0.25, 0.0009765625], np.float32)
    blocks = q8_blocks(codes, scales).reshape(3, 2, 34)
    wide = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8) * wide
    assert np.array_equal(values.reshape(3, 64), codes * scales[:, None])
    with pytest.raises(LimitExceeded, match="float16"):
        q8_blocks(codes, np.full(3, 0.1, np.float32))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_matrices_of_random_models_fit_the_file(name):
    found = RandomModel(TINY).read_dense(name)
    assert q8_blocks(found.data, found.scales).shape == (found.data.shape[0], found.data.shape[1] // 32 * 34)


def test_missing_packages_and_other_families_are_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match="gguf is not installed"):
        write_gguf(tmp_path / "m.gguf", RandomModel(TINY))
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(UsageError, match="xllamacpp is not installed"):
        llama_cpp.LlamaCpp(tmp_path / "m.gguf", threads=1, context=64)
    monkeypatch.setitem(sys.modules, "gguf", pytest)
    with pytest.raises(UsageError, match="no GGUF for mixtral"):
        write_gguf(tmp_path / "m.gguf", RandomModel(MIXTRAL))
    with pytest.raises(UsageError, match="norm_topk_prob"):
        write_gguf(tmp_path / "m.gguf", RandomModel(TINY | {"norm_topk_prob": True}))


def test_ratios_are_medians_over_pairs():
    sides = {"ours": [{"decode": d} for d in (4, 6, 10)], "llama_cpp": [{"decode": d} for d in (2, 2, 2)]}
    assert llama_cpp._ratio(sides, "decode") == 3


def test_the_command_shows_both_sides_and_how_far_apart_they_are(monkeypatch, capsys):
    asked = []

    def measured(config, **how):
        asked.append((config["model_type"], config["num_hidden_layers"], how["rounds"]))
        return {
            "ours": [{"decode": 24.0, "prefill": 75.0}], "llama_cpp": [{"decode": 20.0, "prefill": 50.0}],
            "decode_ratio": 1.2, "prefill_ratio": 1.5, "largest_logprob_difference": 0.134, "void": True,
        }  # fmt: skip

    monkeypatch.setattr("compute_node.bench.llama_cpp.measure_llama_cpp", measured)
    app = typer.Typer()
    bench_llama_cpp.register(app)
    app(["--rounds", "2"], standalone_mode=False)
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("decode │ 24.0 │ 20.0 │ 1.20", "prefill │ 75.0 │ 50.0 │ 1.50", "0.13 apart at most", "Void"):
        assert words in shown
    app(["--layers", "4", "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert (found["decode_ratio"], found["geometry"], found["layers"]) == (1.2, "olmoe-1b-7b", 4)
    assert asked == [("olmoe", 16, 2), ("olmoe", 4, 5)]


@pytest.mark.bench
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
def test_both_sides_compute_the_same_and_are_measured(family):
    pytest.importorskip("xllamacpp", reason="needs the extra llama-cpp")
    qwen = {"model_type": "qwen3_moe", "head_dim": 128, "moe_intermediate_size": 128, "norm_topk_prob": True}
    config = TINY if family == "olmoe" else TINY | qwen
    found = llama_cpp.measure_llama_cpp(
        config, threads=1, rounds=2, tokens=4, prompt=12, rows=8, tell=lambda _: None
    )  # fmt: skip
    assert len(found["ours"]) == len(found["llama_cpp"]) == 2
    assert found["decode_ratio"] > 0
    assert found["prefill_ratio"] > 0
    assert found["largest_logprob_difference"] < 0.1

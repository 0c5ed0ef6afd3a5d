"""The other side of the comparison: what the file says, and what is said where the packages are missing."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from compute_node.bench import llama_cpp
from compute_node.bench.geometries import geometry_named
from compute_node.bench.gguf_file import _blocks, byte_tokens, write_gguf
from tierd.errors import UsageError

TINY = geometry_named("olmoe-1b-7b").config | {
    "hidden_size": 256, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 320, "num_hidden_layers": 2,
}  # fmt: skip


def test_every_byte_has_a_character_of_its_own():
    assert len(set(byte_tokens())) == 256
    assert byte_tokens()[ord("a")] == "a"
    assert byte_tokens()[ord(" ")] == "\u0120"


@pytest.mark.parametrize(("block", "levels"), [(18, 4.6), (34, 74)])
def test_blocks_begin_with_a_scale_that_keeps_outputs_near_one(block, levels):
    pool = np.arange(1001, dtype=np.uint32).astype(np.uint8)
    rows = _blocks(3, 64, block, pool)
    assert rows.shape == (3, 2 * block)
    scales = np.ascontiguousarray(rows.reshape(6, block)[:, :2]).view(np.float16)
    assert (scales == np.float16(64**-0.5 / levels)).all()
    assert len(np.unique(rows.reshape(6, block)[:, 2:])) > 8


def test_missing_packages_and_other_families_are_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match="gguf is not installed"):
        write_gguf(tmp_path / "m.gguf", TINY)
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(UsageError, match="xllamacpp is not installed"):
        llama_cpp.LlamaCpp(tmp_path / "m.gguf", threads=1, context=64)
    monkeypatch.setitem(sys.modules, "gguf", pytest)
    with pytest.raises(UsageError, match="no GGUF for mixtral"):
        write_gguf(tmp_path / "m.gguf", {"model_type": "mixtral"})


def test_ratios_are_medians_over_pairs():
    sides = {"ours": [{"decode": d} for d in (4, 6, 10)], "llama_cpp": [{"decode": d} for d in (2, 2, 2)]}
    assert llama_cpp._ratio(sides, "decode") == 3


@pytest.mark.bench
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
def test_llama_cpp_loads_the_file_and_decodes(family, tmp_path):
    pytest.importorskip("xllamacpp", reason="needs the extra llama-cpp")
    config = TINY | {"model_type": family, "head_dim": 128, "moe_intermediate_size": 128}
    write_gguf(tmp_path / "m.gguf", config)
    model = llama_cpp.LlamaCpp(tmp_path / "m.gguf", threads=1, context=256)
    found = model.run([1, 2, 3, 4], 5)
    assert found["decode"] > 0
    assert found["prefill"] > 0


@pytest.mark.bench
def test_both_sides_are_measured():
    pytest.importorskip("xllamacpp", reason="needs the extra llama-cpp")
    found = llama_cpp.measure_llama_cpp(
        TINY, threads=1, rounds=2, tokens=4, prompt=12, rows=8, tell=lambda _: None
    )  # fmt: skip
    assert len(found["ours"]) == len(found["llama_cpp"]) == 2
    assert found["decode_ratio"] > 0
    assert found["prefill_ratio"] > 0

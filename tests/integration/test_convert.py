"""Conversion from end to end: every weight arrives, whatever the form of the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conversions import CONFIG, SMALL_SHARDS, contents

from tierd.checkpoint import encode
from tierd.checkpoint.convert import convert
from tierd.checkpoint.quantise import bf16_to_f32, dequantise_int4, dequantise_int8
from tierd.checkpoint.synthetic import make_checkpoint
from tierd.errors import UnsupportedModel, UsageError
from tierd.store.store import ExpertStore
from tierd.store.verification import verify_store

ORACLES = Path(__file__).parent.parent / "oracles"


def expert_matrices(store, layer, expert):
    views = store.layout(layer).views(store.read_record(layer, expert))
    matrices = {}
    for name in ("gate", "up", "down"):
        match store.manifest.expert_format:
            case "f32":
                matrices[name] = views[name]
            case "bf16":
                matrices[name] = bf16_to_f32(views[name])
            case "int8":
                matrices[name] = dequantise_int8(views[name], views[f"{name}.scales"])
            case _:
                cols = store.geometry.hidden_size if name != "down" else store.geometry.intermediate_size
                matrices[name] = dequantise_int4(views[name], views[f"{name}.scales"], cols)
    return matrices


def dense_matrix(store, name):
    tensor = store.read_dense(name)
    match tensor.dtype:
        case "f32":
            return tensor.data
        case "bf16":
            return bf16_to_f32(tensor.data)
        case _:
            return dequantise_int8(tensor.data, tensor.scales)


@pytest.mark.parametrize(
    ("experts", "dense", "expert_error", "dense_error"),
    [
        ("native", "native", 0, 0),
        ("bf16", "bf16", 2**-8, 2**-8),
        ("int8", "int8", 0.0041, 0.0041),
        ("int4-g64", "f32", 0.14, 0),
    ],
)
def test_every_weight_arrives_in_every_format(tmp_path, experts, dense, expert_error, dense_error):
    weights = make_checkpoint(tmp_path / "m", CONFIG, dtype="F32", shards=2)
    report = convert(tmp_path / "m", tmp_path / "s", experts=experts, dense=dense, shard_bytes=SMALL_SHARDS)
    store = ExpertStore.open(tmp_path / "s")
    assert (store.fingerprint, store.manifest.family) == (report.fingerprint, "qwen3_moe")
    assert [layer.layer for layer in store.geometry.layers] == [0, 2]
    assert report.bytes_per_weight == store.geometry.layouts[0].bytes_per_weight
    seen = set()
    for layer in (0, 2):
        for expert in range(6):
            for name, matrix in expert_matrices(store, layer, expert).items():
                published = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
                seen.add(published)
                error = np.abs(matrix - weights[published]).max()
                assert error <= expert_error * np.abs(weights[published]).max()
    for name in store.dense_names():
        seen.add(name)
        assert np.abs(dense_matrix(store, name) - weights[name]).max() <= dense_error * np.abs(weights[name]).max()
    assert seen == set(weights)
    assert verify_store(tmp_path / "s").ok
    assert not [path.name for path in (tmp_path / "s").iterdir() if "conversion" in path.name]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_native_keeps_every_bit_of_every_source_type(tmp_path, dtype):
    weights = make_checkpoint(tmp_path / "m", CONFIG, dtype=dtype)
    convert(tmp_path / "m", tmp_path / "s")
    store = ExpertStore.open(tmp_path / "s")
    assert store.manifest.expert_format == ("bf16" if dtype == "BF16" else "f32")
    for name in store.dense_names():
        assert np.array_equal(dense_matrix(store, name), weights[name])
    for name, matrix in expert_matrices(store, 2, 5).items():
        assert np.array_equal(matrix, weights[f"model.layers.2.mlp.experts.5.{name}_proj.weight"])


def test_the_form_of_the_checkpoint_does_not_matter(tmp_path):
    make_checkpoint(tmp_path / "single", CONFIG)
    make_checkpoint(tmp_path / "indexed", CONFIG, shards=4)
    make_checkpoint(tmp_path / "bare", CONFIG, shards=4, index=False)
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in (tmp_path / "indexed").iterdir():
        (linked / path.name).symlink_to(f"../indexed/{path.name}")
    stores = []
    for name in ("single", "indexed", "bare", "linked"):
        convert(tmp_path / name, tmp_path / f"store-{name}", experts="int8", dense="int8", shard_bytes=SMALL_SHARDS)
        stores.append(contents(tmp_path / f"store-{name}"))
    assert stores[0] == stores[1] == stores[2] == stores[3]
    assert all(not path.is_symlink() for path in (tmp_path / "store-linked").iterdir())


def test_stacked_experts_give_the_same_records(tmp_path):
    weights = make_checkpoint(tmp_path / "m", CONFIG, stacked_layers=[0])
    convert(tmp_path / "m", tmp_path / "s")
    store = ExpertStore.open(tmp_path / "s")
    gate_up = weights["model.layers.0.mlp.experts.gate_up_proj"]
    for expert in range(6):
        found = expert_matrices(store, 0, expert)
        assert np.array_equal(found["gate"], gate_up[expert, :16])
        assert np.array_equal(found["up"], gate_up[expert, 16:])
        assert np.array_equal(found["down"], weights["model.layers.0.mlp.experts.down_proj"][expert])


def test_windows_of_rows_do_not_change_dense_tensors(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "m", CONFIG, dtype="F32")
    convert(tmp_path / "m", tmp_path / "whole", dense="int8")
    monkeypatch.setattr(encode, "WINDOW_WEIGHTS", 100)
    convert(tmp_path / "m", tmp_path / "windows", dense="int8")
    assert contents(tmp_path / "whole") == contents(tmp_path / "windows")


@pytest.mark.parametrize(
    "folder", ["olmoe", "mixtral", "qwen3_moe", "mixtral_f16", "qwen3_moe_shards", "qwen3_moe_tied"]
)
def test_checkpoints_written_by_transformers_convert(tmp_path, folder):
    convert(ORACLES / folder, tmp_path / "s")
    store = ExpertStore.open(tmp_path / "s")
    assert store.manifest.model_type == json.loads((ORACLES / folder / "config.json").read_text())["model_type"]
    assert store.read_file("config.json") == (ORACLES / folder / "config.json").read_bytes()


def test_other_content_in_the_destination_is_never_touched(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"not empty \(it has thesis\.txt\)"):
        convert(tmp_path / "m", tmp_path / "s")
    assert contents(tmp_path / "s") == {"thesis.txt": b"mine"}
    with pytest.raises(UsageError, match="not empty"):
        convert(tmp_path / "m", tmp_path / "m")
    with pytest.raises(UsageError, match="not a directory"):
        convert(tmp_path / "m", tmp_path / "s" / "thesis.txt")
    convert(tmp_path / "m", tmp_path / "done")
    with pytest.raises(UsageError, match="already holds a store"):
        convert(tmp_path / "m", tmp_path / "done")


def test_a_refused_checkpoint_leaves_nothing_behind(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG)
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIG | {"model_type": "unheard_of"}))
    with pytest.raises(UnsupportedModel):
        convert(tmp_path / "m", tmp_path / "s")
    assert not (tmp_path / "s").exists()

"""Family mappings: published names found, layouts read from names, everything unknown refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tierd.checkpoint.encode import encode_expert
from tierd.checkpoint.plan import plan_conversion
from tierd.checkpoint.reader import Checkpoint
from tierd.checkpoint.registry import FAMILIES
from tierd.checkpoint.resolve import resolve
from tierd.checkpoint.synthetic import make_checkpoint
from tierd.errors import StoreDamaged, UnsupportedModel, UsageError
from tierd.store.records import expert_layout
from tierd.store.shards import encode_header

ORACLES = Path(__file__).parent.parent / "oracles"
QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 10,
    "mlp_only_layers": [1],
}
OLMOE = {
    "model_type": "olmoe",
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 10,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 10,
}


def resolved(folder):
    return resolve(Checkpoint.open(folder))


def matrices(source):
    record = encode_expert(source, layout := expert_layout("f32", source.down.rows, source.gate.rows))
    return layout.views(record)


def append_tensor(folder, name, shape=(2,)):
    header = encode_header([(name, "F32", shape)], alignment=8)
    (folder / "model-extra.safetensors").write_bytes(header.raw + bytes(header.file_bytes - header.header_bytes))


@pytest.mark.parametrize("folder", sorted(path.name for path in ORACLES.iterdir() if (path / "config.json").exists()))
def test_checkpoints_written_by_transformers_are_understood(folder):
    model = resolved(ORACLES / folder)
    config = json.loads((ORACLES / folder / "config.json").read_text())
    assert config["model_type"] == model.mapping.family
    assert len(model.experts) == sum(model.shape.layers.values())
    for source in model.experts:
        assert (source.gate.rows, source.gate.cols) == (model.shape.intermediate_size, model.shape.hidden_size)


@pytest.mark.parametrize("config", [OLMOE, MIXTRAL, QWEN], ids=lambda config: config["model_type"])
@pytest.mark.parametrize(("hidden", "width"), [(16, 8), (16, 16), (8, 16)], ids=["2I=H", "I=H", "I=2H"])
def test_stacked_and_single_experts_give_the_same_matrices_whatever_the_sizes(tmp_path, config, hidden, width):
    config = config | {"hidden_size": hidden, "intermediate_size": width, "moe_intermediate_size": width}
    weights = make_checkpoint(tmp_path / "m", config, stacked_layers=[0], dtype="F32")
    model = resolved(tmp_path / "m")
    gate_up, down = (weights[name.format(layer=0)] for name in model.mapping.fused[0])
    flat = 0
    for layer, experts in model.shape.layers.items():
        for expert in range(experts):
            views = matrices(model.experts[flat])
            if layer == 0:
                expected = (gate_up[expert, :width], gate_up[expert, width:], down[expert])
            else:
                expected = tuple(weights[name.format(layer=layer, expert=expert)] for name in model.mapping.expert)
            for name, matrix in zip(("gate", "up", "down"), expected, strict=True):
                assert np.array_equal(views[name], matrix)
            flat += 1
    assert flat == len(model.experts)


def test_qwen_layers_without_experts_are_absent_and_dense(tmp_path):
    make_checkpoint(tmp_path / "m", QWEN)
    model = resolved(tmp_path / "m")
    assert list(model.shape.layers) == [0, 2, 3]
    assert "model.layers.1.mlp.gate_proj.weight" in model.dense
    make_checkpoint(tmp_path / "n", QWEN | {"mlp_only_layers": [], "decoder_sparse_step": 2})
    assert list(resolved(tmp_path / "n").shape.layers) == [1, 3]


def test_both_forms_of_the_same_experts_are_refused(tmp_path):
    make_checkpoint(tmp_path / "m", OLMOE)
    append_tensor(tmp_path / "m", "model.layers.1.mlp.experts.gate_up_proj", (4, 16, 16))
    with pytest.raises(StoreDamaged, match=r"there twice, as model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        resolved(tmp_path / "m")


def test_a_router_under_both_of_its_names_is_refused(tmp_path):
    make_checkpoint(tmp_path / "m", MIXTRAL)
    append_tensor(tmp_path / "m", "model.layers.1.mlp.gate.weight", (4, 16))
    with pytest.raises(StoreDamaged, match="there twice"):
        resolved(tmp_path / "m")


def test_an_unknown_tensor_is_refused_by_name(tmp_path):
    make_checkpoint(tmp_path / "m", OLMOE)
    append_tensor(tmp_path / "m", "model.layers.0.self_attn.surprise")
    with pytest.raises(UnsupportedModel, match="surprise"):
        resolved(tmp_path / "m")


def test_a_published_buffer_that_nothing_needs_is_skipped(tmp_path):
    make_checkpoint(tmp_path / "m", MIXTRAL)
    append_tensor(tmp_path / "m", "model.layers.0.self_attn.rotary_emb.inv_freq", (4,))
    assert len(resolved(tmp_path / "m").experts) == 8


def test_missing_tensors_are_counted_and_named(tmp_path):
    make_checkpoint(tmp_path / "m", OLMOE)
    (tmp_path / "m" / "config.json").write_text(json.dumps(OLMOE | {"num_hidden_layers": 3}))
    with pytest.raises(StoreDamaged, match=r"indexed \d+ tensors from 1 files, 21 missing: model\.layers\.2"):
        resolved(tmp_path / "m")


def test_a_shape_that_differs_from_the_config_is_refused(tmp_path):
    make_checkpoint(tmp_path / "m", OLMOE)
    (tmp_path / "m" / "config.json").write_text(json.dumps(OLMOE | {"intermediate_size": 16}))
    with pytest.raises(StoreDamaged, match=r"\[8, 16\], config.json says \[16, 16\]"):
        resolved(tmp_path / "m")


@pytest.mark.parametrize("dtype", ["F64", "I32", "F8_E4M3"])
def test_other_dtypes_are_refused_by_name(tmp_path, dtype):
    make_checkpoint(tmp_path / "m", OLMOE)
    path = tmp_path / "m" / "model.safetensors"
    checkpoint = Checkpoint.open(tmp_path / "m")
    tensors = [
        (t.name, dtype if t.name == "model.norm.weight" else t.dtype, t.shape) for t in checkpoint.tensors.values()
    ]
    header = encode_header(tensors, alignment=8)
    path.write_bytes(header.raw + bytes(header.file_bytes - header.header_bytes))
    with pytest.raises(UnsupportedModel, match=rf"model\.norm\.weight has the dtype {dtype}"):
        resolved(tmp_path / "m")


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_need_no_head(tmp_path, tied):
    make_checkpoint(tmp_path / "m", OLMOE | {"tie_word_embeddings": tied})
    assert ("lm_head.weight" in resolved(tmp_path / "m").dense) is not tied


def test_a_head_saved_beside_tied_embeddings_is_left_out(tmp_path):
    make_checkpoint(tmp_path / "m", OLMOE)
    (tmp_path / "m" / "config.json").write_text(json.dumps(OLMOE | {"tie_word_embeddings": True}))
    assert "lm_head.weight" not in resolved(tmp_path / "m").dense


def test_an_unknown_family_is_refused_with_the_known_ones(tmp_path):
    make_checkpoint(tmp_path / "m", OLMOE)
    (tmp_path / "m" / "config.json").write_text(json.dumps(OLMOE | {"model_type": "gpt5"}))
    with pytest.raises(UnsupportedModel, match="'gpt5'") as caught:
        resolved(tmp_path / "m")
    for family in FAMILIES:
        assert family.model_types[0] in caught.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised .*'fp8'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"hidden_size": "16"}, "hidden_size is '16'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"model_type": None}, "model_type is missing"),
    ],
)
def test_odd_configs_are_refused_by_key(tmp_path, change, message):
    make_checkpoint(tmp_path / "m", OLMOE)
    (tmp_path / "m" / "config.json").write_text(json.dumps(OLMOE | change))
    with pytest.raises(UnsupportedModel, match=message):
        resolved(tmp_path / "m")


def test_attention_biases_are_expected_when_the_config_says_so(tmp_path):
    make_checkpoint(tmp_path / "m", QWEN | {"attention_bias": True})
    assert "model.layers.0.self_attn.q_proj.bias" in resolved(tmp_path / "m").dense


@pytest.mark.parametrize(
    ("dtype", "experts", "dense", "remarks"),
    [("BF16", "bf16", "bf16", 0), ("F32", "f32", "f32", 0), ("F16", "f32", "f32", 2)],
)
def test_native_loses_nothing(tmp_path, dtype, experts, dense, remarks):
    make_checkpoint(tmp_path / "m", OLMOE, dtype=dtype)
    plan = plan_conversion(Checkpoint.open(tmp_path / "m"), experts="native", dense="native", shard_bytes=1 << 30)
    assert (plan.expert_format, plan.dense_format, len(plan.remarks)) == (experts, dense, remarks)


def test_routers_and_norms_are_never_quantised(tmp_path):
    make_checkpoint(tmp_path / "m", OLMOE, dtype="F32")
    plan = plan_conversion(Checkpoint.open(tmp_path / "m"), experts="int8", dense="int8", shard_bytes=1 << 30)
    stored = {item.name: item.stored for shard in plan.dense for item in shard.items}
    assert stored["model.layers.0.mlp.gate.weight"] == "f32"
    assert stored["model.norm.weight"] == "f32"
    assert stored["model.layers.0.self_attn.q_proj.weight"] == "i8"
    assert stored["model.layers.0.self_attn.q_proj.weight.scales"] == "f32"


def test_unknown_format_options_are_refused(tmp_path):
    make_checkpoint(tmp_path / "m", OLMOE)
    with pytest.raises(UsageError, match="--experts 'int2'"):
        plan_conversion(Checkpoint.open(tmp_path / "m"), experts="int2", dense="native", shard_bytes=1 << 30)
    with pytest.raises(UsageError, match="--dense 'int4-g64'"):
        plan_conversion(Checkpoint.open(tmp_path / "m"), experts="native", dense="int4-g64", shard_bytes=1 << 30)

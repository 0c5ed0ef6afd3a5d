"""Family mappings: published names found, layouts read from names, everything unknown refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

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
LATENT = {
    "model_type": "deepseek_v3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "vocab_size": 10,
}
INDEXED = LATENT | {"index_n_heads": 2, "index_head_dim": 4}
GLM4 = QWEN | {"model_type": "glm4_moe", "n_routed_experts": 4, "use_qk_norm": True, "attention_bias": True}
FAMILY_CONFIGS = [
    OLMOE,
    MIXTRAL,
    QWEN,
    LATENT,
    LATENT | {"model_type": "kimi_k2", "q_lora_rank": None},
    INDEXED | {"model_type": "deepseek_v32"},
    INDEXED | {"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared", "full"]},
    {key: value for key, value in GLM4.items() if key not in ("num_experts", "mlp_only_layers")},
    MIXTRAL | {"model_type": "minimax_m2"},
]


def resolved(folder):
    return resolve(Checkpoint.open(folder))


def matrices(source):
    record = source.encode(layout := expert_layout("f32", source.down.rows, source.gate.rows))
    return layout.views(record)


def append_tensor(folder, name, shape=(2,)):
    header = encode_header([(name, "F32", shape)], alignment=8)
    (folder / "model-extra.safetensors").write_bytes(header.raw + bytes(header.file_bytes - header.header_bytes))


@pytest.mark.parametrize("folder", sorted(path.name for path in ORACLES.iterdir() if (path / "config.json").exists()))
def test_checkpoints_written_by_transformers_are_understood(folder):
    model = resolved(ORACLES / folder)
    config = json.loads((ORACLES / folder / "config.json").read_text())
    assert config["model_type"] in model.mapping.model_types
    assert len(model.experts) == sum(model.shape.layers.values())
    for source in model.experts:
        assert (source.gate.rows, source.gate.cols) == (model.shape.intermediate_size, model.shape.hidden_size)


@pytest.mark.parametrize("config", FAMILY_CONFIGS, ids=lambda config: config["model_type"])
@pytest.mark.parametrize(("hidden", "width"), [(16, 8), (16, 16), (8, 16)], ids=["2I=H", "I=H", "I=2H"])
def test_stacked_and_single_experts_give_the_same_matrices_whatever_the_sizes(tmp_path, config, hidden, width):
    config = config | {"hidden_size": hidden, "intermediate_size": width, "moe_intermediate_size": width}
    stacked = config["num_hidden_layers"] - 1
    weights = make_checkpoint(tmp_path / "m", config, stacked_layers=[stacked], dtype="F32")
    model = resolved(tmp_path / "m")
    form = model.mapping.fused[0]
    gate_up, down = (weights[name.format(layer=stacked)] for name in (form.gate_up, form.down))
    flat = 0
    for layer, experts in model.shape.layers.items():
        for expert in range(experts):
            views = matrices(model.experts[flat])
            if layer == stacked:
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


def test_latent_families_name_their_projections_by_the_config(tmp_path):
    make_checkpoint(tmp_path / "m", LATENT | {"attention_bias": True, "n_shared_experts": 3})
    dense = resolved(tmp_path / "m").dense
    assert dense["model.layers.2.self_attn.kv_b_proj.weight"][0].shape == (2 * 7, 5)
    assert dense["model.layers.1.mlp.shared_experts.down_proj.weight"][0].shape == (16, 24)
    assert dense["model.layers.0.mlp.down_proj.weight"][0].shape == (16, 24)
    assert {name.split(".")[-2] for name in dense if name.endswith(".bias")} == {
        "q_a_proj", "kv_a_proj_with_mqa", "o_proj"
    }  # fmt: skip
    make_checkpoint(tmp_path / "n", LATENT | {"q_lora_rank": None})
    assert "model.layers.0.self_attn.q_proj.weight" in resolved(tmp_path / "n").dense


def test_only_layers_with_an_indexer_of_their_own_need_its_tensors(tmp_path):
    config = INDEXED | {"model_type": "glm_moe_dsa", "index_topk_freq": 2, "index_skip_topk_offset": 1}
    make_checkpoint(tmp_path / "m", config)
    layers = {int(name.split(".")[2]) for name in resolved(tmp_path / "m").dense if ".indexer." in name}
    assert layers == {0, 2}


def test_glm_output_projections_have_no_bias(tmp_path):
    make_checkpoint(tmp_path / "m", FAMILY_CONFIGS[7])
    dense = resolved(tmp_path / "m").dense
    assert "model.layers.0.self_attn.q_proj.bias" in dense
    assert "model.layers.0.self_attn.o_proj.bias" not in dense


def test_drafting_layers_are_stored_under_their_names_and_not_as_experts(tmp_path):
    make_checkpoint(tmp_path / "m", LATENT)
    names = ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight")
    header = encode_header([(name, "F32", (2, 3)) for name in names], alignment=8)
    (tmp_path / "m" / "model-extra.safetensors").write_bytes(
        header.raw + bytes(header.file_bytes - header.header_bytes)
    )
    model = resolved(tmp_path / "m")
    assert [model.dense[name][0].shape for name in names] == [(2, 3), (2, 3)]
    assert len(model.experts) == 8
    plan = plan_conversion(Checkpoint.open(tmp_path / "m"), experts="int8", dense="int8", shard_bytes=1 << 30)
    stored = {item.name: item.stored for shard in plan.dense for item in shard.items}
    assert [stored[name] for name in names] == ["f32", "f32"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(LATENT | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.3"):
        resolved(tmp_path / "m")


def renamed(folder, change):
    """Gives every tensor of a checkpoint another name, in place."""
    path = folder / "model.safetensors"
    old, content = Checkpoint.open(folder).headers["model.safetensors"], path.read_bytes()
    tensors = [(change(entry.name), entry.dtype, entry.shape) for entry in old.tensors.values()]
    header = encode_header(tensors, alignment=8)
    path.write_bytes(header.raw + content[old.header_bytes :])


def test_a_composite_is_read_as_its_text_model_and_towers_are_left_out_with_a_remark(tmp_path):
    make_checkpoint(tmp_path / "m", LATENT, dtype="F32")
    plain = resolved(tmp_path / "m")
    make_checkpoint(tmp_path / "c", LATENT, dtype="F32")
    renamed(tmp_path / "c", lambda name: f"language_model.{name}")
    append_tensor(tmp_path / "c", "vision_tower.encoder.blocks.0.wqkv.weight", (3, 2))
    composite = {"model_type": "kimi_k25", "text_config": LATENT | {"model_type": "kimi_k2"}, "vision_config": {}}
    (tmp_path / "c" / "config.json").write_text(json.dumps(composite))
    checkpoint = Checkpoint.open(tmp_path / "c")
    model = resolve(checkpoint)
    assert checkpoint.remarks == ["1 tensors of vision and other towers are left out: only text is converted"]
    assert list(model.dense) == list(plain.dense)
    assert all(
        np.array_equal(matrices(a)["up"], matrices(b)["up"]) for a, b in zip(model.experts, plain.experts, strict=True)
    )


def test_a_tower_beside_a_plain_text_model_is_refused(tmp_path):
    make_checkpoint(tmp_path / "m", LATENT)
    append_tensor(tmp_path / "m", "vision_tower.encoder.blocks.0.wqkv.weight", (3, 2))
    with pytest.raises(UnsupportedModel, match="vision_tower"):
        resolved(tmp_path / "m")


def test_the_same_tensor_under_two_prefixes_is_refused(tmp_path):
    make_checkpoint(tmp_path / "m", LATENT)
    append_tensor(tmp_path / "m", "language_model.model.norm.weight", (16,))
    with pytest.raises(StoreDamaged, match=r"model\.norm\.weight is also in .*, as "):
        resolved(tmp_path / "m")


@pytest.mark.parametrize("model_type", ["kimi_k3", "deepseek_v4", "inkling_mm_model", "muse_spark", "glm5_next"])
def test_families_to_come_are_refused_by_name_with_the_way_to_run_them(tmp_path, model_type):
    make_checkpoint(tmp_path / "m", LATENT)
    (tmp_path / "m" / "config.json").write_text(json.dumps(LATENT | {"model_type": model_type}))
    with pytest.raises(UnsupportedModel, match=f"{model_type}.*not run by the native engine yet") as caught:
        resolved(tmp_path / "m")
    assert "--engine transformers" in caught.value.hint


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
        ({"quantization_config": {"quant_method": "awq"}}, "quantised .*'awq'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size is None"),
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

"""Qwen3-Next, Qwen3.5 and gpt-oss: what their configs say, and the forms in which they are published."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from oracles.quantise_folder import quantise_folder
from safetensors.numpy import load_file, save_file

from compute_node.engine.model import Model, ModelOptions
from compute_node.engine.oracle import compare, read_reference
from compute_node.models.registry import family_of
from tierd.checkpoint.convert import convert
from tierd.checkpoint.reader import Checkpoint
from tierd.checkpoint.resolve import resolve
from tierd.checkpoint.synthetic import make_checkpoint
from tierd.client.in_process import InProcess
from tierd.client.source import Phase
from tierd.errors import StoreDamaged, UnsupportedModel
from tierd.store.store import ExpertStore

ORACLES = Path(__file__).parents[1] / "oracles"
NEXT = {
    "model_type": "qwen3_next", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 8, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "intermediate_size": 24,
    "rope_theta": 10000000, "partial_rotary_factor": 0.25, "max_position_embeddings": 128,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2,
    "rope_theta": 150000, "max_position_embeddings": 131072, "sliding_window": 128,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


def read(config, **changes):
    return family_of(config | changes)[1]


def test_three_of_four_layers_are_linear_unless_the_config_names_them():
    assert sorted(read(NEXT).delta_net.layers) == [0, 1, 2, 4, 5, 6]
    assert sorted(read(NEXT, full_attention_interval=2).delta_net.layers) == [0, 2, 4, 6]
    kinds = ["full_attention", "linear_attention"] * 4
    assert sorted(read(NEXT, layer_types=kinds).delta_net.layers) == [1, 3, 5, 7]


def test_linear_layers_keep_states_and_the_others_keys_and_values():
    family, config = family_of(NEXT | {"num_hidden_layers": 4})
    layout = family.cache_layout(config)
    assert set(layout.planes) == {"layer 3 keys", "layer 3 values"}
    assert layout.states["layer 2 delta"] == (4, 8, 4)
    assert layout.states["layer 0 convolution"] == (3, 2 * 16 + 16)
    assert layout.recurrent
    assert layout.sequence_bytes == 2 * 4 * 3 * (4 * 8 * 4 + 3 * 48)


def test_rotary_share_and_norms_are_those_of_the_family():
    config = read(NEXT)
    assert (config.rope.rotary_dim, config.rope.theta, config.centred_norms) == (2, 1e7, True)
    assert config.routing.renormalise
    text = NEXT | {"model_type": "qwen3_5_moe_text", "rope_theta": None, "partial_rotary_factor": None}
    axes = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    config = read(text, rope_parameters=axes | {"partial_rotary_factor": 0.5})
    assert (config.rope.rotary_dim, config.family) == (4, "Qwen3.5-MoE")


def test_gpt_oss_has_a_window_in_every_other_layer_and_stretches_without_truncation():
    config = read(GPT_OSS)
    assert (config.window, sorted(config.unlimited_layers)) == (128, [1, 3])
    assert config.rope.yarn.truncate is False
    assert config.rope.yarn.attention_factor == pytest.approx(1.3465736)
    kinds = ["full_attention", *["sliding_attention"] * 3]
    assert sorted(read(GPT_OSS, layer_types=kinds).unlimited_layers) == [0]
    assert read(GPT_OSS, experts_per_token=2, swiglu_limit=7.0, initial_context_length=4096).top_k == 2


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (NEXT, {"layer_types": ["linear_attention"]}, "layer_types"),
        (NEXT, {"layer_types": ["mamba"] * 8}, "layer_types"),
        (NEXT, {"linear_num_value_heads": 3}, "linear_num_value_heads"),
        (NEXT, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        (NEXT, {"use_sliding_window": True}, "use_sliding_window"),
        (NEXT, {"attn_output_gate": False}, "attn_output_gate"),
        (NEXT, {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        (NEXT, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        (NEXT, {"model_type": "qwen3_5_moe_text", "norm_topk_prob": False}, "norm_topk_prob"),
        (NEXT, {"ngram_embedding": {"n": 3}}, "ngram_embedding"),
        (GPT_OSS, {"swiglu_limit": 10.0}, "swiglu_limit"),
        (GPT_OSS, {"swiglu_alpha": 1.0}, "swiglu_alpha"),
        (GPT_OSS, {"rope_scaling": None}, "rope_parameters"),
        (GPT_OSS, {"layer_types": ["full_attention"]}, "layer_types"),
        (GPT_OSS, {"experts_per_token": 3}, "experts_per_token"),
        (GPT_OSS, {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config, changes, named):
    with pytest.raises(UnsupportedModel, match=named):
        read(config, **changes)


def published(source, folder):
    """The text model of `source` as its authors publish it: inside a composite, experts stacked, drafting beside it."""
    config = json.loads((source / "config.json").read_text())
    settings = {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "full_attention_interval": 4}
    folder.mkdir()
    composite = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "image_token_id": 99,
        "text_config": config | settings | {"attn_output_gate": True, "mamba_ssm_dtype": "float32"},
        "vision_config": {"depth": 2},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(composite))
    weights, stacked = load_file(source / "model.safetensors"), {}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            name: np.stack([weights.pop(f"{prefix}.{e}.{name}_proj.weight") for e in range(config["num_experts"])])
            for name in ("gate", "up", "down")
        }
        stacked[f"{prefix}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        stacked[f"{prefix}.down_proj"] = parts["down"]
    text = {name.replace("model.", "model.language_model.", 1): array for name, array in (weights | stacked).items()}
    beside = {
        "mtp.fc.weight": np.ones((4, 8), np.float32),
        "model.visual.blocks.0.norm1.weight": np.ones(3, np.float32),
    }
    save_file(text | beside, folder / "model.safetensors")
    return folder


def test_the_published_composite_is_the_same_model_with_drafts_kept_and_vision_left_out(tmp_path):
    folder = published(ORACLES / "qwen3_5_moe", tmp_path / "composite")
    assert any("1 tensors of vision" in remark for remark in Checkpoint.open(folder).remarks)
    convert(folder, tmp_path / "store")
    store = ExpertStore.open(tmp_path / "store")
    assert "mtp.fc.weight" in store.dense_names()
    assert not [name for name in store.dense_names() if "visual" in name or "language_model" in name]
    with Model(InProcess(store), ModelOptions(threads=1)) as model:
        assert compare(model, read_reference(ORACLES / "qwen3_5_moe" / "ref.npz")).passed


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe_text"])
def test_dense_layers_and_fused_experts_are_found_in_checkpoints_of_each_family(tmp_path, name):
    config = NEXT | {"model_type": name, "mlp_only_layers": [1]}
    weights = make_checkpoint(tmp_path / "m", config, stacked_layers=[0, 2], dtype="F32")
    model = resolve(Checkpoint.open(tmp_path / "m"))
    assert list(model.shape.layers) == [0, 2, 3, 4, 5, 6, 7]
    assert "model.layers.1.mlp.gate_proj.weight" in model.dense
    fused = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    assert (fused in model.dense) == (name == "qwen3_next")
    assert len(model.experts) == 4 * 7
    assert model.dense.keys() <= weights.keys()


def test_square_experts_of_gpt_oss_are_not_mistaken_for_each_other(tmp_path):
    weights = make_checkpoint(tmp_path / "m", GPT_OSS, stacked_layers=range(4), dtype="F32")
    convert(tmp_path / "m", tmp_path / "store", experts="f32")
    store = ExpertStore.open(tmp_path / "store")
    views = store.layout(2).views(store.read_record(2, 1))
    both, down = (weights[f"model.layers.2.mlp.experts.{name}"][1] for name in ("gate_up_proj", "down_proj"))
    assert np.array_equal(views["gate"], both[:, 0::2].T)
    assert np.array_equal(views["up"], both[:, 1::2].T)
    assert np.array_equal(views["down"], down.T)


def test_a_shape_that_only_fits_another_layout_is_refused(tmp_path):
    weights = make_checkpoint(tmp_path / "m", GPT_OSS | {"intermediate_size": 24}, stacked_layers=range(4), dtype="F32")
    name = "model.layers.2.mlp.experts.down_proj"
    save_file(weights | {name: np.swapaxes(weights[name], 1, 2).copy()}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(StoreDamaged, match=rf"{name} has the shape \[3, 16, 24\].*\[3, 24, 16\]"):
        resolve(Checkpoint.open(tmp_path / "m"))


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe_text"])
@pytest.mark.parametrize("key_width", [64, 40], ids=["whole blocks", "torn blocks"])
def test_projections_published_in_fp8_give_the_bits_of_their_values(tmp_path, name, key_width):
    sizes = {"hidden_size": 136, "num_hidden_layers": 4, "linear_key_head_dim": key_width, "linear_value_head_dim": 64}
    make_checkpoint(tmp_path / "plain", NEXT | sizes | {"model_type": name, "head_dim": 128}, dtype="F32")
    quantise_folder(tmp_path / "plain", tmp_path / "codes", tmp_path / "values", coding="fp8")
    logits = []
    for form in ("codes", "values"):
        convert(tmp_path / form, tmp_path / f"{form} store")
        with Model(InProcess(ExpertStore.open(tmp_path / f"{form} store")), ModelOptions(threads=1)) as model:
            tokens = list(range(30))
            logits.append(model.extend(model.cache.take(), tokens, phase=Phase.PREFILL, logits_of=range(30)))
    assert np.isfinite(logits[0]).all()
    assert np.array_equal(*logits)

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compute_node.models.config_reader import ConfigReader, parse_config
from compute_node.models.decoder_config import check_geometry
from compute_node.models.registry import FAMILIES, family_of
from tierd.errors import StoreDamaged, TierdError, UnsupportedModel
from tierd.store.geometry import ExpertLayer, Geometry
from tierd.store.records import expert_layout

ORACLES = Path(__file__).parents[1] / "oracles"

QWEN3 = {
    "model_type": "qwen3_moe",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def read(**changes):
    return family_of({key: value for key, value in (QWEN3 | changes).items() if value != "absent"})[1]


def test_every_oracle_config_is_understood():
    folders = sorted(path.parent for path in ORACLES.glob("*/config.json"))
    assert len(folders) >= 9
    for folder in folders:
        family, config = family_of(parse_config((folder / "config.json").read_bytes()))
        assert family.model_type in FAMILIES
        assert config.hidden_size in (32, 64, 96, 136)


def test_old_and_new_rope_settings_mean_the_same():
    new = read(rope_theta="absent", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert new == read() == read(rope_scaling=None) == read(rope_scaling={"type": "default"})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "contradicts"),
        ({"rope_parameters": {"rope_theta": 1e6, "beta_fast": 32}}, "beta_fast"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"logit_softcap": 30.0}, "logit_softcap"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_local_experts": 16}, "num_local_experts"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"head_dim": None, "num_attention_heads": 6, "num_key_value_heads": 6}, "num_attention_heads"),
        ({"mlp_only_layers": [4]}, "mlp_only_layers"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"num_attention_heads": "absent"}, "num_attention_heads"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModel, match=named):
        read(**changes)


def test_a_stretched_context_is_as_long_as_the_stretching_says():
    stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read(rope_scaling=stretched).max_positions == 512
    assert read(rope_scaling=stretched, max_position_embeddings=1024).max_positions == 1024


def test_unknown_family_is_refused_with_the_list_of_known_ones():
    with pytest.raises(UnsupportedModel, match=r"'gpt2'.*\n.*mixtral, olmoe,.* qwen3_moe"):
        family_of({"model_type": "gpt2"})


@pytest.mark.parametrize("model_type", ["kimi_k3", "deepseek_v4", "inkling_mm_model", "muse_spark", "glm5_next"])
def test_families_to_come_are_refused_by_name_with_the_way_to_run_them(model_type):
    with pytest.raises(UnsupportedModel, match=rf"{model_type}.*not run.*yet\n.*--engine transformers"):
        family_of({"model_type": model_type})


def test_settings_that_are_switched_off_are_accepted():
    assert read(use_qk_norm=None, some_list=[], some_flag=False) == read()


def test_sliding_window_counts_only_where_it_is_used():
    assert read(sliding_window=4096).window is None
    assert read(sliding_window=64, use_sliding_window=True).window == 64
    mixtral = {"model_type": "mixtral", "num_attention_heads": 32, "sliding_window": 8}
    assert family_of(mixtral)[1].window == 8
    olmoe = {"model_type": "olmoe", "num_attention_heads": 16}
    assert family_of(olmoe)[1].window is None
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        family_of(olmoe | {"sliding_window": 8})


def test_dense_layers_come_from_the_list_and_from_the_step():
    assert read(mlp_only_layers=[0]).expert_layers == (1, 2, 3)
    assert read(decoder_sparse_step=2).expert_layers == (1, 3)
    assert read(decoder_sparse_step=2, mlp_only_layers=[1]).expert_layers == (3,)


def test_family_defaults_are_those_of_the_published_classes():
    mixtral = family_of({"model_type": "mixtral", "num_attention_heads": 32, "num_key_value_heads": 8})[1]
    assert (mixtral.rope.theta, mixtral.experts, mixtral.top_k, mixtral.routing.renormalise) == (1e6, 8, 2, True)
    olmoe = family_of({"model_type": "olmoe", "num_attention_heads": 16})[1]
    assert (olmoe.rope.theta, olmoe.experts, olmoe.top_k, olmoe.routing.renormalise) == (1e4, 64, 8, False)
    assert (olmoe.head_dim, olmoe.kv_heads, olmoe.clip_qkv) == (128, 16, None)


def test_olmoe_head_dim_must_be_hidden_size_by_heads():
    with pytest.raises(UnsupportedModel, match="head_dim"):
        family_of({"model_type": "olmoe", "num_attention_heads": 16, "head_dim": 64})


def test_end_of_text_may_be_one_token_or_several():
    assert read(eos_token_id=5).eos_token_ids == (5,)
    assert read(eos_token_id=[5, 7]).eos_token_ids == (5, 7)
    assert read().eos_token_ids == ()


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


def deepseek(**changes):
    return family_of(DEEPSEEK | changes)[1]


def test_yarn_divides_slow_wavelengths_keeps_fast_ones_and_scales_the_scores():
    config = deepseek(qk_rope_head_dim=64)
    yarn = config.rope.yarn
    assert yarn.attention_factor == 1.0
    assert config.latent.scale == pytest.approx((8 + 64) ** -0.5 * (0.1 * math.log(40) + 1) ** 2)
    plain = 10000.0 ** (-np.arange(32) / 32)
    turns = yarn.frequencies(64, 10000.0)
    assert np.array_equal(turns[:10], plain[:10])
    np.testing.assert_allclose(turns[23:], plain[23:] / 40)
    assert (np.diff(turns) < 0).all()


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        ({}, 0.1 * math.log(40) + 1),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
        ({"attention_factor": 1.5}, 1.5),
    ],
)
def test_the_attention_factor_of_yarn_is_given_or_follows_from_the_scale(scaling, factor):
    base = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    assert deepseek(rope_scaling=base | scaling).rope.yarn.attention_factor == pytest.approx(factor)


def test_families_with_latents_keep_one_row_per_token_and_indexers_one_more():
    family, config = family_of(DEEPSEEK)
    planes = family.cache_layout(config).planes
    assert {name: (plane.heads, plane.width) for name, plane in planes.items()} == {
        f"layer {layer} latent": (1, 24) for layer in range(4)
    }
    glm = DEEPSEEK | {
        "model_type": "glm_moe_dsa", "rope_scaling": None, "index_head_dim": 12, "index_topk_pattern": "FFSF"
    }  # fmt: skip
    family, config = family_of(glm)
    names = {name for name in family.cache_layout(config).planes if name.endswith("index keys")}
    assert names == {"layer 0 index keys", "layer 1 index keys", "layer 3 index keys"}


def test_drafting_layers_are_known_but_not_run():
    assert deepseek().kept == deepseek(num_nextn_predict_layers=1).kept == ("model.layers.4.",)
    assert deepseek(num_nextn_predict_layers=2).kept == ("model.layers.4.", "model.layers.5.")
    assert deepseek(num_mtp_layers=0).kept == ()


def test_kimi_has_its_own_name_and_may_be_inside_a_composite():
    assert deepseek(model_type="kimi_k2").family == "Kimi K2"
    family, config = family_of({
        "model_type": "kimi_k25", "text_config": DEEPSEEK | {"model_type": "kimi_k2"}, "vision_config": {"depth": 2},
        "tie_word_embeddings": True,
    })  # fmt: skip
    assert (family.model_type, config.tied_embeddings) == ("kimi_k2", True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"qk_head_dim": 24}, "qk_head_dim"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "longrope"),
        ({"n_hash_layers": 3}, "n_hash_layers"),
        ({"model_type": "deepseek_v32", "q_lora_rank": None}, "q_lora_rank"),
        ({"model_type": "deepseek_v32", "index_head_dim": 2}, "index_head_dim"),
        ({"model_type": "deepseek_v32", "layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["shared"] * 4}, "indexer_types"),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["full"]}, "indexer_types"),
        ({"model_type": "glm_moe_dsa", "indexer_rope_interleave": False}, "indexer_rope_interleave"),
    ],
)
def test_what_a_family_with_latents_does_not_know_is_refused_by_name(changes, named):
    with pytest.raises(UnsupportedModel, match=named):
        deepseek(**changes)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_broken_config_files_are_refused(content):
    with pytest.raises(UnsupportedModel, match="config"):
        parse_config(content)


@given(
    st.dictionaries(
        st.sampled_from([*QWEN3, "rope_parameters", "rope_scaling", "mlp_only_layers", "eos_token_id", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
            max_leaves=4,
        ),
        max_size=4,
    )
)
def test_any_config_is_read_or_refused_but_never_breaks(changes):
    try:
        _, config = family_of(QWEN3 | changes | {"model_type": "qwen3_moe"})
    except TierdError:
        return
    assert min(config.hidden_size, config.head_dim, config.top_k) >= 1
    assert config.top_k <= config.experts


def test_geometry_must_match_the_config():
    config = read()
    layout = expert_layout("f32", 32, 16)

    def geometry(**changes):
        facts = {
            "hidden_size": 32,
            "intermediate_size": 16,
            "top_k": 2,
            "layers": tuple(ExpertLayer(layer=layer, experts=8, layout=0) for layer in range(4)),
            "layouts": (layout,),
        }
        return Geometry(**(facts | changes))

    check_geometry(config, geometry())
    with pytest.raises(StoreDamaged, match="top-k is 3"):
        check_geometry(config, geometry(top_k=3))
    with pytest.raises(StoreDamaged, match="layers with experts"):
        check_geometry(config, geometry(layers=(ExpertLayer(layer=0, experts=8, layout=0),)))


def test_reader_shows_the_value_it_refuses():
    error = ConfigReader({"a": "b" * 1000}, "family").refuse("a", "no")
    assert "family" in error.message
    assert len(error.message) < 300
    assert json.dumps("b" * 1000)[:100] in error.message

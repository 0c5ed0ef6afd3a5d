"""Configurations that nobody fixed in advance, for comparing with transformers live: odd head counts and widths too."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

__all__ = ["RANDOM_CONFIGS"]

HIDDEN = (24, 32, 40, 56)


def _common(draw: st.DrawFn, *, layers: int = 1) -> dict[str, Any]:
    return {
        "hidden_size": draw(st.sampled_from(HIDDEN)),
        "num_hidden_layers": draw(st.integers(layers, layers + 2)),
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from((1e-6, 1e-5))),
    }


def _grouped(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    return {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from((4, 6, 10, 16, 18))),
    }


def _latent(draw: st.DrawFn) -> dict[str, Any]:
    heads = draw(st.sampled_from((1, 3, 4, 5)))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": draw(st.sampled_from((None, 7, 16))),
        "kv_lora_rank": draw(st.sampled_from((9, 16, 33))),
        "qk_nope_head_dim": draw(st.sampled_from((5, 8, 17))),
        "qk_rope_head_dim": draw(st.sampled_from((2, 6, 8))),
        "v_head_dim": draw(st.sampled_from((3, 8, 20))),
        "attention_bias": draw(st.booleans()),
    }


def _rope(draw: st.DrawFn) -> dict[str, Any]:
    plain = {"rope_type": "default", "rope_theta": draw(st.sampled_from((1e4, 1e7)))}
    stretched = {
        "rope_type": "yarn",
        "factor": draw(st.sampled_from((2.0, 4.0))),
        "original_max_position_embeddings": 64,
    }
    return draw(st.sampled_from((plain, plain | stretched)))


def _sparse(draw: st.DrawFn, layers: int, *, grouped: bool) -> dict[str, Any]:
    groups = draw(st.sampled_from((1, 2, 4))) if grouped else 1
    size, kept = draw(st.integers(2, 5)), draw(st.integers(1, groups))
    return {
        "n_group": groups,
        "topk_group": kept,
        "n_routed_experts": groups * size,
        "num_experts_per_tok": draw(st.integers(1, min(4, kept * size))),
        "n_shared_experts": draw(st.integers(1, 2)),
        "moe_intermediate_size": draw(st.sampled_from((12, 20, 28))),
        "intermediate_size": draw(st.sampled_from((24, 36))),
        "first_k_dense_replace": draw(st.integers(0, layers - 1)),
        "norm_topk_prob": draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from((1.0, 2.5))),
    }


@st.composite
def _olmoe(draw: st.DrawFn) -> dict[str, Any]:
    common, heads = _common(draw), draw(st.sampled_from((1, 2, 4)))
    experts = draw(st.integers(3, 13))
    return common | {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": draw(st.sampled_from((12, 20, 56))),
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, min(5, experts))),
        "norm_topk_prob": draw(st.booleans()),
        "clip_qkv": draw(st.sampled_from((None, 0.8))),
        "attention_bias": draw(st.booleans()),
    }


@st.composite
def _mixtral(draw: st.DrawFn) -> dict[str, Any]:
    experts = draw(st.integers(2, 9))
    return _common(draw) | _grouped(draw) | {
        "intermediate_size": draw(st.sampled_from((12, 20, 28, 56))),
        "num_local_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, min(4, experts))),
        "sliding_window": draw(st.sampled_from((None, 5))),
    }  # fmt: skip


@st.composite
def _qwen3_moe(draw: st.DrawFn) -> dict[str, Any]:
    common, experts = _common(draw, layers=2), draw(st.integers(3, 13))
    return common | _grouped(draw) | {
        "intermediate_size": 36,
        "moe_intermediate_size": draw(st.sampled_from((12, 20, 28))),
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, min(5, experts))),
        "norm_topk_prob": draw(st.booleans()),
        "mlp_only_layers": draw(st.sampled_from(([], [0]))),
        "attention_bias": draw(st.booleans()),
        "rope_parameters": _rope(draw),
    }  # fmt: skip


@st.composite
def _deepseek_v3(draw: st.DrawFn) -> dict[str, Any]:
    common = _common(draw, layers=2)
    yarn = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": draw(st.sampled_from((2.0, 40.0))), "beta_fast": 32,
        "beta_slow": 1, "mscale": draw(st.sampled_from((0.7, 1.0))),
        "mscale_all_dim": draw(st.sampled_from((0.7, 1.0))),
        "original_max_position_embeddings": draw(st.sampled_from((16, 64))),
    }  # fmt: skip
    plain = {"rope_type": "default", "rope_theta": 1e4}
    rope = {"rope_parameters": draw(st.sampled_from((plain, yarn)))}
    return common | _latent(draw) | _sparse(draw, common["num_hidden_layers"], grouped=True) | rope


@st.composite
def _glm4_moe(draw: st.DrawFn) -> dict[str, Any]:
    common, heads = _common(draw, layers=2), _grouped(draw)
    heads["head_dim"] = draw(st.sampled_from((8, 16, 24)))  # a quarter of it is even, as pairs must be
    return common | heads | _sparse(draw, common["num_hidden_layers"], grouped=False) | {
        "use_qk_norm": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": draw(st.sampled_from((0.25, 0.5, 1.0))),
        },
    }  # fmt: skip


@st.composite
def _glm_moe_dsa(draw: st.DrawFn) -> dict[str, Any]:
    common, latent = _common(draw, layers=2), _latent(draw)
    latent["q_lora_rank"] = draw(st.sampled_from((7, 16)))
    layers = common["num_hidden_layers"]
    kinds = ["full", *(draw(st.sampled_from(("full", "shared"))) for _ in range(layers - 1))]
    return common | latent | _sparse(draw, layers, grouped=True) | {
        "index_topk": draw(st.sampled_from((5, 8, 64))),
        "index_head_dim": latent["qk_rope_head_dim"] + draw(st.sampled_from((0, 4))),
        "index_n_heads": 16,
        "indexer_types": kinds,
    }  # fmt: skip


@st.composite
def _gpt_oss(draw: st.DrawFn) -> dict[str, Any]:
    common, experts = _common(draw), draw(st.integers(2, 9))
    layers = common["num_hidden_layers"]
    return common | _grouped(draw) | {
        "intermediate_size": draw(st.sampled_from((12, 20, 28, 56))),
        "num_local_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, min(4, experts))),
        # With a window of 1 the cache of transformers keeps every position: it cuts at `-window + 1`.
        "sliding_window": draw(st.sampled_from((2, 5, 30))),
        "attention_bias": draw(st.booleans()),
        "layer_types": [draw(st.sampled_from(("sliding_attention", "full_attention"))) for _ in range(layers)],
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": draw(st.sampled_from((2.0, 32.0))),
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": draw(st.booleans()),
            "original_max_position_embeddings": draw(st.sampled_from((16, 64))),
        },
    }  # fmt: skip


@st.composite
def _qwen3_next(draw: st.DrawFn) -> dict[str, Any]:
    common, experts, key_heads = _common(draw, layers=2), draw(st.integers(2, 9)), draw(st.integers(1, 3))
    layers, heads = common["num_hidden_layers"], _grouped(draw)
    heads["head_dim"] = draw(st.sampled_from((8, 16, 24)))
    return common | heads | {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw(st.integers(1, 3)),
        "linear_key_head_dim": draw(st.sampled_from((3, 8, 17))),
        "linear_value_head_dim": draw(st.sampled_from((5, 8, 70))),
        "linear_conv_kernel_dim": draw(st.integers(2, 5)),
        "layer_types": [draw(st.sampled_from(("linear_attention", "full_attention"))) for _ in range(layers - 1)]
        + ["full_attention"],
        "intermediate_size": 36,
        "moe_intermediate_size": draw(st.sampled_from((12, 20, 28))),
        "shared_expert_intermediate_size": draw(st.sampled_from((12, 30))),
        "num_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, min(4, experts))),
        "norm_topk_prob": draw(st.booleans()),
        "mlp_only_layers": draw(st.sampled_from(([], [0]))),
        "attention_bias": draw(st.booleans()),
        "rope_parameters": _rope(draw) | {"partial_rotary_factor": draw(st.sampled_from((0.25, 0.5, 1.0)))},
    }  # fmt: skip


RANDOM_CONFIGS = {
    "Olmoe": _olmoe(),
    "Mixtral": _mixtral(),
    "Qwen3Moe": _qwen3_moe(),
    "DeepseekV3": _deepseek_v3(),
    "Glm4Moe": _glm4_moe(),
    "GlmMoeDsa": _glm_moe_dsa(),
    "GptOss": _gpt_oss(),
    "Qwen3Next": _qwen3_next(),
}
"""By the name of the configuration class in transformers, without `Config`."""

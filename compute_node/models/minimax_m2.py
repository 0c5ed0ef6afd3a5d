"""MiniMax M2 (model_type `minimax_m2`): grouped queries with partly turned heads, corrected sigmoid routing.

Source: configuration_minimax_m2.py and modeling_minimax_m2.py of transformers, and the published config.
"""

from __future__ import annotations

from typing import Any, Final

from compute_node.kernels import RoutingRule
from compute_node.models.blocks.attention import QueryKeyNorm, grouped_attention
from compute_node.models.blocks.experts import routed_experts
from compute_node.models.config_reader import ConfigReader
from compute_node.models.decoder import DecoderBuilder
from compute_node.models.decoder_config import DecoderConfig, head_sizes
from compute_node.models.rope_settings import read_rope

__all__ = ["decoder_layer", "read_config"]

_FIXED: Final[dict[str, Any]] = {
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_qk_norm": True,
    "use_routing_bias": True,
}
"""Settings of the published config that the model's code knows no other value of."""


def read_config(read: ConfigReader) -> DecoderConfig:
    """Sizes and switches from config.json, with the defaults of MiniMaxM2Config."""
    hidden_size, layers = read.integer("hidden_size"), read.integer("num_hidden_layers")
    heads, kv_heads, head_dim = head_sizes(read, hidden_size)
    for name, value in _FIXED.items():
        if read.value(name) not in (None, value):
            raise read.refuse(name, f"the family has {value}")
    for unused in ("mlp_intermediate_size", "shared_moe_mode", "num_mtp_modules", "mtp_transformer_layers", "use_mtp"):
        read.value(unused)
    kinds = read.value("attn_type_list")
    if kinds not in (None, [1] * layers):
        raise read.refuse("attn_type_list", "every layer has softmax attention")
    rotary = read.optional_integer("rotary_dim")
    rope = read_rope(read, theta=5000000.0, head_dim=head_dim, share=rotary / head_dim if rotary else 1.0)
    if rotary is not None and rotary != rope.rotary_dim:
        raise read.refuse("rotary_dim", f"it contradicts the {rope.rotary_dim} elements of partial_rotary_factor")
    read.silu()
    config = DecoderConfig(
        family="MiniMax M2",
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=read.integer("max_position_embeddings", default=196608),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope=rope,
        window=read.optional_integer("sliding_window"),
        attention_bias=False,
        tied_embeddings=read.boolean("tie_word_embeddings", default=False),
        experts=read.integer("num_local_experts", "num_experts"),
        top_k=read.integer("num_experts_per_tok", default=8),
        expert_width=read.integer("intermediate_size"),
        routing=RoutingRule(score="sigmoid", renormalise=True),
        kept=("model.mtp_modules.", "mtp."),
        eos_token_ids=read.token_ids("eos_token_id"),
        bos_token_id=read.first_token_id("bos_token_id"),
    )
    read.finish()
    return config


def decoder_layer(build: DecoderBuilder, layer: int) -> None:
    """Attention with norms of queries and keys over their full width, then routed experts in every layer."""
    grouped_attention(build, layer, norm=QueryKeyNorm.FULL_WIDTH)
    block = f"model.layers.{layer}.block_sparse_moe"
    routed_experts(build, layer, router=f"{block}.gate.weight", correction=f"{block}.e_score_correction_bias")

"""Mixtral (model_type `mixtral`): grouped queries, an optional sliding window, top-2 experts with renormalised weights.

Source: configuration_mixtral.py and modeling_mixtral.py of transformers; Jiang et al. 2024, arXiv 2401.04088.
"""

from __future__ import annotations

from compute_node.kernels import RoutingRule
from compute_node.models.blocks.attention import QueryKeyNorm, grouped_attention
from compute_node.models.blocks.experts import routed_experts
from compute_node.models.config_reader import ConfigReader
from compute_node.models.decoder import DecoderBuilder
from compute_node.models.decoder_config import DecoderConfig, head_sizes
from compute_node.models.rope_settings import read_rope

__all__ = ["decoder_layer", "read_config"]


def read_config(read: ConfigReader) -> DecoderConfig:
    """Sizes and switches from config.json, with the defaults of MixtralConfig."""
    hidden_size = read.integer("hidden_size", default=4096)
    heads, kv_heads, head_dim = head_sizes(read, hidden_size)
    read.silu()
    config = DecoderConfig(
        family="Mixtral",
        vocab_size=read.integer("vocab_size", default=32000),
        hidden_size=hidden_size,
        layers=read.integer("num_hidden_layers", default=32),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=read.integer("max_position_embeddings", default=131072),
        rms_norm_eps=read.number("rms_norm_eps", 1e-5),
        rope=read_rope(read, theta=1000000.0, head_dim=head_dim),
        window=read.optional_integer("sliding_window"),
        attention_bias=False,
        tied_embeddings=read.boolean("tie_word_embeddings", default=False),
        experts=read.integer("num_local_experts", "num_experts", default=8),
        top_k=read.integer("num_experts_per_tok", default=2),
        expert_width=read.integer("intermediate_size", default=14336),
        routing=RoutingRule(renormalise=True),
        eos_token_ids=read.token_ids("eos_token_id"),
        bos_token_id=read.first_token_id("bos_token_id"),
    )
    read.finish()
    return config


def decoder_layer(build: DecoderBuilder, layer: int) -> None:
    """Attention, then routed experts in every layer."""
    grouped_attention(build, layer, norm=QueryKeyNorm.NONE)
    routed_experts(build, layer, router=f"model.layers.{layer}.block_sparse_moe.gate.weight")

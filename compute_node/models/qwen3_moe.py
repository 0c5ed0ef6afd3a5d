"""Qwen3-MoE (model_type `qwen3_moe`): norm of queries and keys per head; some layers may be dense.

Source: configuration_qwen3_moe.py and modeling_qwen3_moe.py of transformers; Qwen3 report, arXiv 2505.09388.
"""

from __future__ import annotations

from compute_node.kernels import RoutingRule
from compute_node.models.blocks.attention import QueryKeyNorm, grouped_attention
from compute_node.models.blocks.experts import routed_experts
from compute_node.models.blocks.mlp import dense_mlp
from compute_node.models.config_reader import ConfigReader
from compute_node.models.decoder import DecoderBuilder
from compute_node.models.decoder_config import DecoderConfig, head_sizes
from compute_node.models.rope_settings import read_rope

__all__ = ["decoder_layer", "passed_over_layers", "read_config"]


def read_config(read: ConfigReader) -> DecoderConfig:
    """Sizes and switches from config.json, with the defaults of Qwen3MoeConfig."""
    hidden_size = read.integer("hidden_size", default=2048)
    heads, kv_heads, head_dim = head_sizes(read, hidden_size)
    layers = read.integer("num_hidden_layers", default=24)
    read.silu()
    window = read.optional_integer("sliding_window")
    if not read.boolean("use_sliding_window", default=False):
        window = None
    rope = read_rope(read, theta=10000.0, head_dim=head_dim, yarn=True)
    config = DecoderConfig(
        family="Qwen3-MoE",
        vocab_size=read.integer("vocab_size", default=151936),
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max(read.integer("max_position_embeddings", default=32768), rope.reach),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope=rope,
        window=window,
        attention_bias=read.boolean("attention_bias", default=False),
        tied_embeddings=read.boolean("tie_word_embeddings", default=False),
        experts=read.integer("num_experts", "num_local_experts", default=128),
        top_k=read.integer("num_experts_per_tok", default=8),
        expert_width=read.integer("moe_intermediate_size", default=768),
        routing=RoutingRule(renormalise=read.boolean("norm_topk_prob", default=False)),
        dense_layers=passed_over_layers(read, layers),
        dense_width=read.integer("intermediate_size", default=6144),
        eos_token_ids=read.token_ids("eos_token_id"),
        bos_token_id=read.first_token_id("bos_token_id"),
    )
    read.finish()
    return config


def passed_over_layers(read: ConfigReader, layers: int) -> frozenset[int]:
    """Layers named in `mlp_only_layers`, and those that `decoder_sparse_step` passes over."""
    step = read.integer("decoder_sparse_step", default=1)
    dense = read.layer_numbers("mlp_only_layers", layers)
    return dense | {layer for layer in range(layers) if (layer + 1) % step}


def decoder_layer(build: DecoderBuilder, layer: int) -> None:
    """Attention, then routed experts or, in the layers so configured, one dense SwiGLU block."""
    grouped_attention(build, layer, norm=QueryKeyNorm.PER_HEAD)
    if layer in build.config.dense_layers:
        dense_mlp(build, layer)
    else:
        routed_experts(build, layer, router=f"model.layers.{layer}.mlp.gate.weight")

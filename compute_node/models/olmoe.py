"""OLMoE (model_type `olmoe`): norm of queries and keys over their full width, then clip, then split into heads.

Source: configuration_olmoe.py and modeling_olmoe.py of transformers; Muennighoff et al. 2024, arXiv 2409.02060.
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
    """Sizes and switches from config.json, with the defaults of OlmoeConfig."""
    hidden_size = read.integer("hidden_size", default=2048)
    heads, kv_heads, head_dim = head_sizes(read, hidden_size)
    if head_dim * heads != hidden_size:
        raise read.refuse("head_dim", f"the family has head_dim = hidden_size / heads = {hidden_size / heads:g}")
    if read.value("sliding_window") is not None:
        raise read.refuse("sliding_window", "the family has none")
    read.silu()
    config = DecoderConfig(
        family="OLMoE",
        vocab_size=read.integer("vocab_size", default=50304),
        hidden_size=hidden_size,
        layers=read.integer("num_hidden_layers", default=16),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=read.integer("max_position_embeddings", default=4096),
        rms_norm_eps=read.number("rms_norm_eps", 1e-5),
        rope=read_rope(read, theta=10000.0, head_dim=head_dim),
        window=None,
        attention_bias=read.boolean("attention_bias", default=False),
        clip_qkv=read.optional_number("clip_qkv"),
        tied_embeddings=read.boolean("tie_word_embeddings", default=False),
        experts=read.integer("num_experts", "num_local_experts", default=64),
        top_k=read.integer("num_experts_per_tok", default=8),
        expert_width=read.integer("intermediate_size", default=2048),
        routing=RoutingRule(renormalise=read.boolean("norm_topk_prob", default=False)),
        eos_token_ids=read.token_ids("eos_token_id"),
        bos_token_id=read.first_token_id("bos_token_id"),
    )
    read.finish()
    return config


def decoder_layer(build: DecoderBuilder, layer: int) -> None:
    """Attention, then routed experts in every layer."""
    grouped_attention(build, layer, norm=QueryKeyNorm.FULL_WIDTH)
    routed_experts(build, layer, router=f"model.layers.{layer}.mlp.gate.weight")

"""GLM-4.5 and 4.6 (model_type `glm4_moe`): grouped queries with partly turned heads, experts chosen by sigmoids.

Source: configuration_glm4_moe.py and modeling_glm4_moe.py of transformers; GLM-4.5 report, arXiv:2508.06471.
"""

from __future__ import annotations

from compute_node.models.blocks.attention import QueryKeyNorm, grouped_attention
from compute_node.models.config_reader import ConfigReader
from compute_node.models.decoder import DecoderBuilder
from compute_node.models.decoder_config import DecoderConfig, head_sizes
from compute_node.models.deepseek_v3 import drafting_layers, leading_dense_layers, read_sigmoid_routing, sparse_mlp
from compute_node.models.rope_settings import read_rope

__all__ = ["decoder_layer", "read_config"]


def read_config(read: ConfigReader) -> DecoderConfig:
    """Sizes and switches from config.json, with the defaults of Glm4MoeConfig."""
    hidden_size, layers = read.integer("hidden_size"), read.integer("num_hidden_layers")
    heads, kv_heads, head_dim = head_sizes(read, hidden_size)
    expert_width = read.integer("moe_intermediate_size")
    read.silu()
    config = DecoderConfig(
        family="GLM-4.5",
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=read.integer("max_position_embeddings", default=131072),
        rms_norm_eps=read.number("rms_norm_eps", 1e-5),
        rope=read_rope(read, theta=10000.0, head_dim=head_dim, share=0.5),
        window=None,
        attention_bias=read.boolean("attention_bias", default=False),
        query_key_norm=read.boolean("use_qk_norm", default=False),
        tied_embeddings=read.boolean("tie_word_embeddings", default=False),
        experts=read.integer("n_routed_experts", "num_local_experts", "num_experts"),
        top_k=read.integer("num_experts_per_tok", default=8),
        expert_width=expert_width,
        routing=read_sigmoid_routing(read, 1, 1, scaling=1.0),
        dense_layers=leading_dense_layers(read, layers, default=1),
        dense_width=read.integer("intermediate_size"),
        shared_width=expert_width * read.integer("n_shared_experts", default=1),
        kept=drafting_layers(read, layers),
        eos_token_ids=read.token_ids("eos_token_id"),
        bos_token_id=read.first_token_id("bos_token_id"),
    )
    read.finish()
    return config


def decoder_layer(build: DecoderBuilder, layer: int) -> None:
    """Attention whose output projection never has a bias, then experts or, in the first layers, one dense block."""
    norm = QueryKeyNorm.PER_HEAD if build.config.query_key_norm else QueryKeyNorm.NONE
    grouped_attention(build, layer, norm=norm, output_bias=False)
    sparse_mlp(build, layer)

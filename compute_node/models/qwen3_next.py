"""Qwen3-Next (model_type `qwen3_next`): gated DeltaNet in three of four layers, gated attention in the others.

Source: configuration_qwen3_next.py and modeling_qwen3_next.py of transformers; Yang, Kautz and Hatamizadeh 2024,
arXiv:2412.06464. Qwen3.5 and 3.6 have the same layers: `read_hybrid` and `decoder_layer` serve both.
"""

from __future__ import annotations

from compute_node.engine.cache_layout import CacheLayout, Plane
from compute_node.kernels import RoutingRule
from compute_node.models.blocks.delta_net import delta_net
from compute_node.models.blocks.experts import routed_experts
from compute_node.models.blocks.gated import gated_attention, gated_shared_expert
from compute_node.models.blocks.mlp import dense_mlp
from compute_node.models.config_reader import ConfigReader
from compute_node.models.decoder import DecoderBuilder
from compute_node.models.decoder_config import DecoderConfig
from compute_node.models.delta_net_sizes import DeltaNetSizes
from compute_node.models.qwen3_moe import passed_over_layers
from compute_node.models.rope_settings import read_rope

__all__ = ["cache_layout", "decoder_layer", "read_config", "read_hybrid"]


def read_config(read: ConfigReader) -> DecoderConfig:
    """Sizes and switches from config.json, with the defaults of Qwen3NextConfig."""
    return read_hybrid(read, "Qwen3-Next", layers=48, experts=512, top_k=10, vocab_size=151936, fused=True)


def read_hybrid(
    read: ConfigReader, family: str, *, layers: int, experts: int, top_k: int, vocab_size: int, fused: bool
) -> DecoderConfig:
    """The same for any family of these layers.

    Args:
        read: the config.
        family: name for people.
        layers: default of `num_hidden_layers`.
        experts: default of `num_experts`.
        top_k: default of `num_experts_per_tok`.
        vocab_size: default.
        fused: the projections of DeltaNet are fused, see `DeltaNetSizes`.
    """
    layers = read.integer("num_hidden_layers", default=layers)
    read.silu()
    if read.boolean("use_sliding_window", default=False):
        raise read.refuse("use_sliding_window", "the family has no window")
    if not read.boolean("attn_output_gate", default=True):
        raise read.refuse("attn_output_gate", "only attention with an output gate is known")
    if read.value("mamba_ssm_dtype") not in (None, "float32"):
        raise read.refuse("mamba_ssm_dtype", "recurrent states are float32")
    heads = read.integer("num_attention_heads", default=16)
    head_dim = read.integer("head_dim", default=256)
    axes = ("mrope_section", "mrope_interleaved")
    rope = read_rope(read, theta=10000.0, head_dim=head_dim, share=0.25, yarn=True, ignored=axes)
    config = DecoderConfig(
        family=family,
        vocab_size=read.integer("vocab_size", default=vocab_size),
        hidden_size=read.integer("hidden_size", default=2048),
        layers=layers,
        heads=heads,
        kv_heads=read.integer("num_key_value_heads", default=2),
        head_dim=head_dim,
        max_positions=max(read.integer("max_position_embeddings", default=32768), rope.reach),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope=rope,
        window=None,
        attention_bias=read.boolean("attention_bias", default=False),
        tied_embeddings=read.boolean("tie_word_embeddings", default=False),
        experts=read.integer("num_experts", "num_local_experts", default=experts),
        top_k=read.integer("num_experts_per_tok", default=top_k),
        expert_width=read.integer("moe_intermediate_size", default=512),
        routing=RoutingRule(renormalise=read.boolean("norm_topk_prob", default=True)),
        dense_layers=passed_over_layers(read, layers),
        dense_width=read.integer("intermediate_size", default=5632),
        shared_width=read.integer("shared_expert_intermediate_size", default=512),
        centred_norms=True,
        delta_net=_delta_net(read, layers, fused=fused),
        kept=("mtp.",),
        eos_token_ids=read.token_ids("eos_token_id"),
        bos_token_id=read.first_token_id("bos_token_id"),
    )
    read.finish()
    return config


def _delta_net(read: ConfigReader, layers: int, *, fused: bool) -> DeltaNetSizes:
    """Sizes of the linear layers: those that `layer_types` names, else all but every fourth."""
    interval = read.integer("full_attention_interval", default=4)
    kinds = read.choices("layer_types", ("linear_attention", "full_attention"))
    if kinds is not None and len(kinds) != layers:
        raise read.refuse("layer_types", f"one entry for each of {layers} layers is expected")
    if kinds is None:
        linear = frozenset(layer for layer in range(layers) if (layer + 1) % interval)
    else:
        linear = frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    sizes = DeltaNetSizes(
        key_heads=read.integer("linear_num_key_heads", default=16),
        value_heads=read.integer("linear_num_value_heads", default=32),
        key_width=read.integer("linear_key_head_dim", default=128),
        value_width=read.integer("linear_value_head_dim", default=128),
        taps=read.integer("linear_conv_kernel_dim", default=4, minimum=2),
        layers=linear,
        fused=fused,
    )
    if sizes.value_heads % sizes.key_heads:
        raise read.refuse("linear_num_value_heads", f"it is not a multiple of {sizes.key_heads} key heads")
    return sizes


def cache_layout(config: DecoderConfig) -> CacheLayout:
    """Keys and values of the layers with attention, recurrent states of the others."""
    sizes = config.delta_net
    assert sizes is not None, "read_hybrid sets it"
    plane = Plane(config.kv_heads, config.head_dim)
    attention = [layer for layer in range(config.layers) if layer not in sizes.layers]
    states: dict[str, tuple[int, ...]] = {}
    for layer in sorted(sizes.layers):
        states |= sizes.states(layer)
    return CacheLayout({f"layer {layer} {kind}": plane for layer in attention for kind in ("keys", "values")}, states)


def decoder_layer(build: DecoderBuilder, layer: int) -> None:
    """DeltaNet or gated attention, then routed experts and a gated shared one, or one dense block."""
    config = build.config
    if config.delta_net is not None and layer in config.delta_net.layers:
        delta_net(build, layer)
    else:
        gated_attention(build, layer)
    if layer in config.dense_layers:
        dense_mlp(build, layer)
    else:
        routed_experts(build, layer, router=f"model.layers.{layer}.mlp.gate.weight", shared=gated_shared_expert)

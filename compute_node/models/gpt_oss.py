"""gpt-oss (model_type `gpt_oss`): attention sinks, windows in every other layer, biases, clamped experts.

Source: configuration_gpt_oss.py and modeling_gpt_oss.py of transformers; gpt-oss model card, arXiv:2508.10925.
"""

from __future__ import annotations

from compute_node.kernels import RoutingRule
from compute_node.models.blocks.attention import attend, attention_output, input_norm, project_heads, rotate_heads
from compute_node.models.blocks.experts import routed_experts
from compute_node.models.config_reader import ConfigReader
from compute_node.models.decoder import DecoderBuilder
from compute_node.models.decoder_config import DecoderConfig
from compute_node.models.rope_settings import read_rope

__all__ = ["decoder_layer", "read_config"]


def read_config(read: ConfigReader) -> DecoderConfig:
    """Sizes and switches from config.json, with the defaults of GptOssConfig."""
    layers = read.integer("num_hidden_layers", default=36)
    head_dim = read.integer("head_dim", default=64)
    read.silu()  # what the configs say; the experts' activation is the family's own
    for name, known in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if read.number(name, known) != known:
            raise read.refuse(name, f"the family's experts have {known}")
    if read.value("rope_parameters") is None and read.value("rope_scaling") is None:
        raise read.refuse("rope_parameters", "the family's rotary embeddings are stretched by settings that are absent")
    read.value("initial_context_length")
    window = read.integer("sliding_window", default=128)
    config = DecoderConfig(
        family="gpt-oss",
        vocab_size=read.integer("vocab_size", default=201088),
        hidden_size=read.integer("hidden_size", default=2880),
        layers=layers,
        heads=read.integer("num_attention_heads", default=64),
        kv_heads=read.integer("num_key_value_heads", default=8),
        head_dim=head_dim,
        max_positions=read.integer("max_position_embeddings", default=131072),
        rms_norm_eps=read.number("rms_norm_eps", 1e-5),
        rope=read_rope(read, theta=150000.0, head_dim=head_dim, yarn=True),
        window=window,
        unlimited_layers=_unlimited_layers(read, layers),
        attention_bias=read.boolean("attention_bias", default=True),
        tied_embeddings=read.boolean("tie_word_embeddings", default=False),
        experts=read.integer("num_local_experts", "num_experts", default=128),
        top_k=read.integer("num_experts_per_tok", "experts_per_token", default=4),
        expert_width=read.integer("intermediate_size", default=2880),
        routing=RoutingRule(renormalise=True),
        eos_token_ids=read.token_ids("eos_token_id"),
        bos_token_id=read.first_token_id("bos_token_id"),
    )
    read.finish()
    return config


def _unlimited_layers(read: ConfigReader, layers: int) -> frozenset[int]:
    """Layers without a window: those that `layer_types` says, else every second one, beginning with layer 1."""
    kinds = read.choices("layer_types", ("sliding_attention", "full_attention"))
    if kinds is None:
        return frozenset(range(1, layers, 2))
    if len(kinds) != layers:
        raise read.refuse("layer_types", f"one entry for each of {layers} layers is expected")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "full_attention")


def decoder_layer(build: DecoderBuilder, layer: int) -> None:
    """Attention with a sink for each head, then routed experts; the router's softmax is over the chosen alone."""
    config, prefix = build.config, f"model.layers.{layer}"
    input_norm(build, layer)
    heads = project_heads(build, layer, bias=config.attention_bias)
    rotate_heads(build, layer, heads)
    window = None if layer in config.unlimited_layers else config.window
    sinks = build.vector(f"{prefix}.self_attn.sinks", config.heads)
    attended = attend(build, layer, heads, window=window, sinks=sinks)
    attention_output(build, layer, attended, bias=config.attention_bias)
    routed_experts(build, layer, router=f"{prefix}.mlp.router.weight", bias=f"{prefix}.mlp.router.bias")

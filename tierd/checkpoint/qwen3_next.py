"""Qwen3-Next (Qwen/Qwen3-Next-80B-A3B-Instruct): gated DeltaNet in three of four layers, gated attention in the others.

Qwen3.5 and 3.6 have the same layers and publish their projections apart; `hybrid_dense` serves both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.checkpoint.mapping import EXPERT, STACKED, DenseSpec, FamilyMapping, swiglu
from tierd.checkpoint.qwen3_moe import stepped_shape
from tierd.errors import UnsupportedModel

if TYPE_CHECKING:
    from tierd.checkpoint.config import Config

__all__ = ["QWEN3_NEXT", "drafting", "hybrid_dense"]


def _linear_layers(config: Config) -> frozenset[int]:
    """Layers with DeltaNet: as `layer_types` says, else all but every fourth (`full_attention_interval`)."""
    layers = config.integer("num_hidden_layers", high=1 << 16)
    interval = config.integer("full_attention_interval", default=4)
    kinds = config.table.get("layer_types")
    if kinds is None:
        return frozenset(layer for layer in range(layers) if (layer + 1) % interval)
    known = {"linear_attention", "full_attention"}
    if not isinstance(kinds, list) or len(kinds) != layers or not {str(kind) for kind in kinds} <= known:
        raise UnsupportedModel(
            f"{config.where}: layer_types is {str(kinds)[:200]}; {layers} entries of {' or '.join(sorted(known))} "
            "are wanted"
        )
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")


def hybrid_dense(config: Config, *, fused: bool) -> dict[str, DenseSpec]:
    """Every dense tensor of a model with DeltaNet and gated attention.

    Args:
        config: of the checkpoint.
        fused: q, k, v and z of DeltaNet are one projection, b and a another; else qkv, z, b and a are apart.
    """
    shape, linear = stepped_shape(config), _linear_layers(config)
    hidden = shape.hidden_size
    dense = {"model.embed_tokens.weight": DenseSpec((shape.vocab_size, hidden))}
    for layer in range(config.integer("num_hidden_layers")):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            dense[f"{prefix}.{norm}.weight"] = DenseSpec((hidden,), keep_precision=True)
        if layer in linear:
            dense |= _delta_net(config, f"{prefix}.linear_attn", fused=fused)
        else:
            dense |= _attention(config, f"{prefix}.self_attn")
        dense |= _mlp(config, f"{prefix}.mlp", shape.layers.get(layer))
    dense["model.norm.weight"] = DenseSpec((hidden,), keep_precision=True)
    if not config.flag("tie_word_embeddings", default=False):
        dense["lm_head.weight"] = DenseSpec((shape.vocab_size, hidden))
    return dense


def _delta_net(config: Config, prefix: str, *, fused: bool) -> dict[str, DenseSpec]:
    """A DeltaNet layer; what decides how fast a state decays keeps its precision."""
    hidden = config.integer("hidden_size")
    heads, width = config.integer("linear_num_value_heads"), config.integer("linear_value_head_dim")
    keys = config.integer("linear_num_key_heads") * config.integer("linear_key_head_dim")
    channels = 2 * keys + heads * width
    taps = config.integer("linear_conv_kernel_dim")
    if fused:
        projections = {
            "in_proj_qkvz": DenseSpec((channels + heads * width, hidden)),
            "in_proj_ba": DenseSpec((2 * heads, hidden), keep_precision=True),
        }
    else:
        projections = {
            "in_proj_qkv": DenseSpec((channels, hidden)),
            "in_proj_z": DenseSpec((heads * width, hidden)),
            "in_proj_b": DenseSpec((heads, hidden), keep_precision=True),
            "in_proj_a": DenseSpec((heads, hidden), keep_precision=True),
        }
    return {
        **{f"{prefix}.{name}.weight": spec for name, spec in projections.items()},
        f"{prefix}.conv1d.weight": DenseSpec((channels, 1, taps), keep_precision=True),
        f"{prefix}.dt_bias": DenseSpec((heads,), keep_precision=True),
        f"{prefix}.A_log": DenseSpec((heads,), keep_precision=True),
        f"{prefix}.norm.weight": DenseSpec((width,), keep_precision=True),
        f"{prefix}.out_proj.weight": DenseSpec((hidden, heads * width)),
    }


def _attention(config: Config, prefix: str) -> dict[str, DenseSpec]:
    """Gated attention: each head's rows of q_proj are its query, then its gate."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads, head_dim = config.integer("num_key_value_heads", default=heads), config.integer("head_dim", default=256)
    sizes = {
        "q_proj": (2 * heads * head_dim, hidden),
        "k_proj": (kv_heads * head_dim, hidden),
        "v_proj": (kv_heads * head_dim, hidden),
        "o_proj": (hidden, heads * head_dim),
    }
    dense = {f"{prefix}.{name}.weight": DenseSpec(size) for name, size in sizes.items()}
    if config.flag("attention_bias", default=False):
        dense |= {f"{prefix}.{name}.bias": DenseSpec(size[:1], keep_precision=True) for name, size in sizes.items()}
    for name in ("q_norm", "k_norm"):
        dense[f"{prefix}.{name}.weight"] = DenseSpec((head_dim,), keep_precision=True)
    return dense


def _mlp(config: Config, prefix: str, experts: int | None) -> dict[str, DenseSpec]:
    """Router, shared expert and its gate, or one dense block where a layer has no routed experts."""
    hidden = config.integer("hidden_size")
    if experts is None:
        return swiglu(prefix, config.integer("intermediate_size"), hidden)
    return {
        f"{prefix}.gate.weight": DenseSpec((experts, hidden), keep_precision=True),
        **swiglu(f"{prefix}.shared_expert", config.integer("shared_expert_intermediate_size"), hidden),
        f"{prefix}.shared_expert_gate.weight": DenseSpec((1, hidden), keep_precision=True),
    }


def drafting(_config: Config) -> tuple[str, ...]:
    """Tensors of multi-token prediction."""
    return ("mtp.",)


def _dense(config: Config) -> dict[str, DenseSpec]:
    return hybrid_dense(config, fused=True)


QWEN3_NEXT = FamilyMapping(
    family="qwen3_next",
    model_types=("qwen3_next",),
    shape=stepped_shape,
    dense=_dense,
    expert=EXPERT,
    fused=(STACKED,),
    kept=drafting,
)

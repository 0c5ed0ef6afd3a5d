"""DeepSeek-V3 and R1 (model_type `deepseek_v3`) and Kimi K2 (`kimi_k2`): latent attention, experts chosen by group.

Source: configuration_deepseek_v3.py and modeling_deepseek_v3.py of transformers; DeepSeek-V3 report, arXiv:2412.19437;
Kimi K2 report, arXiv:2507.20534.
"""

from __future__ import annotations

from compute_node.kernels import RoutingRule
from compute_node.models.blocks.experts import routed_experts
from compute_node.models.blocks.latent_attention import latent_attention, latent_layout
from compute_node.models.blocks.mlp import dense_mlp, shared_expert
from compute_node.models.config_reader import ConfigReader
from compute_node.models.decoder import DecoderBuilder
from compute_node.models.decoder_config import DecoderConfig
from compute_node.models.latent_settings import IndexerSettings, LatentSettings
from compute_node.models.rope_settings import RopeSettings, read_rope
from compute_node.models.yarn import magnitude

__all__ = [
    "cache_layout",
    "decoder_layer",
    "drafting_layers",
    "leading_dense_layers",
    "read_config",
    "read_latent_config",
    "read_sigmoid_routing",
    "sparse_mlp",
]

cache_layout = latent_layout


def read_config(read: ConfigReader) -> DecoderConfig:
    """Sizes and switches from config.json, with the defaults of DeepseekV3Config."""
    layers = read.integer("num_hidden_layers")
    if not read.boolean("rope_interleave", default=True):
        raise read.refuse("rope_interleave", "the family's rotary pairs are neighbours")
    return read_latent_config(
        read,
        "Kimi K2" if read.value("model_type") == "kimi_k2" else "DeepSeek-V3",
        dense_layers=leading_dense_layers(read, layers),
        groups=(8, 4),
        indexer=None,
        theta=10000.0,
        rms_norm_eps=1e-6,
        max_positions=4096,
    )


def read_latent_config(
    read: ConfigReader,
    family: str,
    *,
    dense_layers: frozenset[int],
    groups: tuple[int, int],
    indexer: IndexerSettings | None,
    theta: float,
    rms_norm_eps: float,
    max_positions: int,
) -> DecoderConfig:
    """What all families with latent attention have in common.

    Args:
        read: the config.
        family: name for people.
        dense_layers: layers without experts.
        groups: groups of experts and groups kept, where the config says nothing.
        indexer: of the attention, already read.
        theta: base of the rotary embeddings where the config has none.
        rms_norm_eps: where the config has none.
        max_positions: where the config has none.
    """
    heads, layers = read.integer("num_attention_heads"), read.integer("num_hidden_layers")
    if read.integer("num_key_value_heads", default=heads) != heads:
        raise read.refuse("num_key_value_heads", "latent attention has as many as query heads")
    plain, rotary = read.integer("qk_nope_head_dim"), read.integer("qk_rope_head_dim")
    if read.integer("qk_head_dim", default=plain + rotary) != plain + rotary:
        raise read.refuse("qk_head_dim", "it is the sum of qk_nope_head_dim and qk_rope_head_dim")
    # transformers writes the rotary width as head_dim; some published configs write another number nobody reads.
    read.value("head_dim")
    rope = read_rope(read, theta=theta, head_dim=rotary, interleaved=True, yarn=True)
    expert_width = read.integer("moe_intermediate_size")
    read.silu()
    for training in ("aux_loss_alpha", "ep_size", "seq_aux"):
        read.value(training)
    config = DecoderConfig(
        family=family,
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=plain + rotary,
        max_positions=read.integer("max_position_embeddings", default=max_positions),
        rms_norm_eps=read.number("rms_norm_eps", rms_norm_eps),
        rope=rope,
        window=None,
        attention_bias=read.boolean("attention_bias", default=False),
        tied_embeddings=read.boolean("tie_word_embeddings", default=False),
        experts=read.integer("n_routed_experts", "num_local_experts", "num_experts"),
        top_k=read.integer("num_experts_per_tok", default=8),
        expert_width=expert_width,
        routing=read_sigmoid_routing(read, *groups),
        dense_layers=dense_layers,
        dense_width=read.integer("intermediate_size"),
        shared_width=expert_width * read.integer("n_shared_experts", default=1),
        latent=LatentSettings(
            query_rank=read.optional_integer("q_lora_rank"),
            rank=read.integer("kv_lora_rank"),
            plain=plain,
            rotary=rotary,
            value=read.integer("v_head_dim"),
            scale=_score_scale(plain + rotary, rope),
        ),
        indexer=indexer,
        kept=drafting_layers(read, layers),
        eos_token_ids=read.token_ids("eos_token_id"),
        bos_token_id=read.first_token_id("bos_token_id"),
    )
    read.finish()
    return config


def read_sigmoid_routing(read: ConfigReader, groups: int, kept_groups: int, *, scaling: float = 2.5) -> RoutingRule:
    """Sigmoid scores with a correction for the choice, from groups if there are several; the rest are defaults."""
    if read.value("scoring_func") not in (None, "sigmoid"):
        raise read.refuse("scoring_func", "only sigmoid is known")
    if read.value("topk_method") not in (None, "noaux_tc"):
        raise read.refuse("topk_method", "only noaux_tc is known")
    return RoutingRule(
        score="sigmoid",
        renormalise=read.boolean("norm_topk_prob", default=True),
        eps=1e-20,
        scaling=read.number("routed_scaling_factor", scaling),
        groups=read.integer("n_group", default=groups),
        kept_groups=read.integer("topk_group", default=kept_groups),
    )


def leading_dense_layers(read: ConfigReader, layers: int, default: int = 3) -> frozenset[int]:
    """The first layers have no experts (`first_k_dense_replace`), or those that `mlp_layer_types` calls dense."""
    first = read.integer("first_k_dense_replace", default=default, minimum=0)
    if read.integer("moe_layer_freq", default=1) != 1:
        raise read.refuse("moe_layer_freq", "every layer behind the first has experts")
    kinds = read.choices("mlp_layer_types", ("dense", "sparse"))
    if kinds is None:
        return frozenset(range(min(first, layers)))
    if len(kinds) != layers:
        raise read.refuse("mlp_layer_types", f"one entry for each of {layers} layers is expected")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "dense")


def sparse_mlp(build: DecoderBuilder, layer: int) -> None:
    """A dense block, or routed experts chosen by corrected sigmoids and a shared one."""
    if layer in build.config.dense_layers:
        dense_mlp(build, layer)
        return
    gate = f"model.layers.{layer}.mlp.gate"
    routed_experts(
        build, layer, router=f"{gate}.weight", correction=f"{gate}.e_score_correction_bias", shared=shared_expert
    )


def decoder_layer(build: DecoderBuilder, layer: int) -> None:
    """Latent attention, then experts or, in the first layers, one dense block."""
    latent_attention(build, layer)
    sparse_mlp(build, layer)


def _score_scale(head_dim: int, rope: RopeSettings) -> float:
    """head_dim ** -0.5, times the square of what YaRN's `mscale_all_dim` comes to."""
    yarn = rope.yarn
    grown = 1.0 if yarn is None or not yarn.all_dim_weight else magnitude(yarn.factor, yarn.all_dim_weight)
    return float(head_dim**-0.5 * grown * grown)


def drafting_layers(read: ConfigReader, layers: int) -> tuple[str, ...]:
    """Where the weights of multi-token prediction are: in layers behind the last one."""
    count = read.integer("num_nextn_predict_layers", "num_mtp_layers", default=1, minimum=0)
    return tuple(f"model.layers.{layer}." for layer in range(layers, layers + count))

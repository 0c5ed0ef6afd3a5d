"""DeepSeek-V3 and R1 (deepseek-ai/DeepSeek-V3), Kimi K2 (moonshotai/Kimi-K2-Instruct) and V3.2 with its indexer.

`latent_dense` and `sparse_layers` also serve GLM-5. A layer behind the last one holds the weights of multi-token
prediction; its tensors are kept under their names, not run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tierd.checkpoint.mapping import EXPERT, INV_FREQ, STACKED, DenseSpec, FamilyMapping, ModelShape, swiglu
from tierd.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Collection

    from tierd.checkpoint.config import Config

__all__ = [
    "DEEPSEEK_V3",
    "DEEPSEEK_V32",
    "drafting_layers",
    "latent_dense",
    "sparse_layers",
    "sparse_mlp",
    "sparse_shape",
]

_VISION: Final = ("vision_tower.", "mm_projector.", "model.visual.", "visual.", "model.vision_tower.")
"""Beginnings of the names of vision towers and what ties them to the text model."""


def sparse_layers(config: Config, *, leading: int = 3) -> list[int]:
    """Layers with experts: all but the first `first_k_dense_replace`, or those that `mlp_layer_types` calls sparse."""
    layers = config.integer("num_hidden_layers", high=1 << 16)
    kinds = config.table.get("mlp_layer_types")
    if kinds is None:
        return list(range(config.integer("first_k_dense_replace", default=leading, low=0), layers))
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise UnsupportedModel(
            f"{config.where}: mlp_layer_types is {str(kinds)[:200]}; {layers} entries of dense or sparse are wanted"
        )
    return [layer for layer, kind in enumerate(kinds) if kind == "sparse"]


def sparse_shape(config: Config, *, leading: int = 3) -> ModelShape:
    """Sizes of the routed experts; the first `leading` layers have none unless the config says otherwise."""
    experts = config.integer("n_routed_experts", "num_local_experts", "num_experts")
    return ModelShape(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("moe_intermediate_size"),
        top_k=config.integer("num_experts_per_tok", default=8, high=experts),
        vocab_size=config.integer("vocab_size"),
        layers=dict.fromkeys(sparse_layers(config, leading=leading), experts),
    )


def sparse_mlp(config: Config, shape: ModelShape, layer: int) -> dict[str, DenseSpec]:
    """Router, correction and shared expert of a layer with experts; the dense block of one without."""
    prefix, hidden = f"model.layers.{layer}.mlp", shape.hidden_size
    experts = shape.layers.get(layer)
    if experts is None:
        return swiglu(prefix, config.integer("intermediate_size"), hidden)
    width = config.integer("n_shared_experts", default=1) * shape.intermediate_size
    return {
        f"{prefix}.gate.weight": DenseSpec((experts, hidden), keep_precision=True),
        f"{prefix}.gate.e_score_correction_bias": DenseSpec((experts,), keep_precision=True),
    } | swiglu(f"{prefix}.shared_experts", width, hidden)


def latent_dense(config: Config, shape: ModelShape, *, indexed: Collection[int] = ()) -> dict[str, DenseSpec]:
    """Every dense tensor of a decoder with latent attention.

    Args:
        config: of the checkpoint.
        shape: of its experts.
        indexed: layers with an indexer.
    """
    hidden = shape.hidden_size
    dense = {"model.embed_tokens.weight": DenseSpec((shape.vocab_size, hidden))}
    for layer in range(config.integer("num_hidden_layers")):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            dense[f"{prefix}.{norm}.weight"] = DenseSpec((hidden,), keep_precision=True)
        dense |= _attention(config, f"{prefix}.self_attn", hidden)
        if layer in indexed:
            dense |= _indexer(config, f"{prefix}.self_attn.indexer", hidden)
        dense |= sparse_mlp(config, shape, layer)
    dense["model.norm.weight"] = DenseSpec((hidden,), keep_precision=True)
    if not config.flag("tie_word_embeddings", default=False):
        dense["lm_head.weight"] = DenseSpec((shape.vocab_size, hidden))
    return dense


def drafting_layers(config: Config) -> tuple[str, ...]:
    """Beginnings of the names of multi-token prediction: layers behind the last one."""
    count = config.integer("num_nextn_predict_layers", "num_mtp_layers", default=1, low=0, high=64)
    layers = config.integer("num_hidden_layers")
    return tuple(f"model.layers.{layer}." for layer in range(layers, layers + count))


def _attention(config: Config, prefix: str, hidden: int) -> dict[str, DenseSpec]:
    heads, rank = config.integer("num_attention_heads"), config.integer("kv_lora_rank")
    plain, rotary = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    value = config.integer("v_head_dim")
    matrices = {
        "kv_a_proj_with_mqa": (rank + rotary, hidden),
        "kv_b_proj": (heads * (plain + value), rank),
        "o_proj": (hidden, heads * value),
    }
    norms = {"kv_a_layernorm": rank}
    biased = ["kv_a_proj_with_mqa", "o_proj"]
    if config.table.get("q_lora_rank") is None:
        matrices["q_proj"] = (heads * (plain + rotary), hidden)
    else:
        query_rank = config.integer("q_lora_rank")
        matrices |= {"q_a_proj": (query_rank, hidden), "q_b_proj": (heads * (plain + rotary), query_rank)}
        norms["q_a_layernorm"] = query_rank
        biased.append("q_a_proj")
    dense = {f"{prefix}.{name}.weight": DenseSpec(shape) for name, shape in matrices.items()}
    dense |= {f"{prefix}.{name}.weight": DenseSpec((width,), keep_precision=True) for name, width in norms.items()}
    if config.flag("attention_bias", default=False):
        dense |= {f"{prefix}.{name}.bias": DenseSpec(matrices[name][:1], keep_precision=True) for name in biased}
    return dense


def _indexer(config: Config, prefix: str, hidden: int) -> dict[str, DenseSpec]:
    heads, width = config.integer("index_n_heads"), config.integer("index_head_dim")
    return {
        f"{prefix}.wq_b.weight": DenseSpec((heads * width, config.integer("q_lora_rank"))),
        f"{prefix}.wk.weight": DenseSpec((width, hidden)),
        f"{prefix}.weights_proj.weight": DenseSpec((heads, hidden), keep_precision=True),
        f"{prefix}.k_norm.weight": DenseSpec((width,), keep_precision=True),
        f"{prefix}.k_norm.bias": DenseSpec((width,), keep_precision=True),
    }


def _dense(config: Config) -> dict[str, DenseSpec]:
    return latent_dense(config, sparse_shape(config))


def _indexed_dense(config: Config) -> dict[str, DenseSpec]:
    return latent_dense(config, sparse_shape(config), indexed=range(config.integer("num_hidden_layers")))


DEEPSEEK_V3 = FamilyMapping(
    family="deepseek_v3",
    model_types=("deepseek_v3", "kimi_k2", "kimi_k25"),
    shape=sparse_shape,
    dense=_dense,
    expert=EXPERT,
    fused=(STACKED,),
    skip=(INV_FREQ,),
    kept=drafting_layers,
    towers=_VISION,
)

DEEPSEEK_V32 = FamilyMapping(
    family="deepseek_v32",
    model_types=("deepseek_v32",),
    shape=sparse_shape,
    dense=_indexed_dense,
    expert=EXPERT,
    fused=(STACKED,),
    skip=(INV_FREQ,),
    kept=drafting_layers,
)

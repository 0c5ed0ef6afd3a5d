"""What a family mapping says: how config.json gives the shapes, and under which names the tensors are published."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tierd.store.formats import Activation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tierd.checkpoint.config import Config

__all__ = [
    "EXPERT",
    "INV_FREQ",
    "STACKED",
    "DenseSpec",
    "FamilyMapping",
    "ModelShape",
    "StackedForm",
    "alike_layers",
    "decoder_dense",
    "swiglu",
]


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A dense tensor that the family needs.

    Attributes:
        shape: from the config.
        keep_precision: routers, norms and biases are never quantised.
        aliases: other names under which it may be published.
    """

    shape: tuple[int, ...]
    keep_precision: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the routed experts, from the config alone.

    Attributes:
        hidden_size: H.
        intermediate_size: I of one expert.
        top_k: experts per token.
        vocab_size: rows of the embedding.
        layers: routed experts by layer number; layers without any are absent.
    """

    hidden_size: int
    intermediate_size: int
    top_k: int
    vocab_size: int
    layers: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class StackedForm:
    """All experts of a layer in two tensors; names are templates of {layer}.

    Codes of quantised checkpoints lie beside them under the same names with a suffix (`expert_finder.py`), always with
    one row per output; `transposed` speaks of plain weights only.

    Attributes:
        gate_up: [E, 2I, H], the gate's rows first.
        down: [E, H, I].
        interleaved: gate and up take turns, the gate's row first.
        transposed: [E, H, 2I] and [E, I, H] instead, one column per output.
        biases: float tensors [E, 2I] (in the order of gate_up) and [E, H] that belong to the experts.
    """

    gate_up: str
    down: str
    interleaved: bool = False
    transposed: bool = False
    biases: tuple[str, str] | None = None


EXPERT: Final = tuple(
    f"model.layers.{{layer}}.mlp.experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up", "down")
)
"""Names that most families give the matrices of an expert."""

STACKED: Final = StackedForm(
    "model.layers.{layer}.mlp.experts.gate_up_proj", "model.layers.{layer}.mlp.experts.down_proj"
)
"""Names by which transformers saves all experts of a layer."""

INV_FREQ: Final = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""What rotary embeddings are computed from, which older checkpoints have as a tensor."""


def _nothing(_config: Config) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class FamilyMapping:
    """One model family.

    Attributes:
        family: its short name.
        model_types: values of `model_type` in config.json that it covers.
        shape: sizes from the config.
        dense: every dense tensor that must be there, by name.
        expert: name templates of gate [I, H], up [I, H] and down [H, I] of one expert ({layer}, {expert}); empty
            where the family is only published stacked.
        fused: the stacked forms in which a layer may be published instead.
        skip: patterns of published tensors that inference does not need.
        activation: between gate, up and down; a value of `tierd.store.formats.Activation`.
        kept: beginnings of the names of tensors that are stored as they are though nothing runs them: multi-token
            prediction, kept for drafting.
        towers: beginnings of the names of vision and other towers of composites, left out with a remark.
    """

    family: str
    model_types: tuple[str, ...]
    shape: Callable[[Config], ModelShape]
    dense: Callable[[Config], dict[str, DenseSpec]]
    expert: tuple[str, ...]
    fused: tuple[StackedForm, ...] = ()
    skip: tuple[str, ...] = ()
    activation: Activation = Activation.SILU
    kept: Callable[[Config], tuple[str, ...]] = _nothing
    towers: tuple[str, ...] = ()

    @property
    def expert_biases(self) -> bool:
        """True if each expert has biases of gate, up and down."""
        return any(form.biases is not None for form in self.fused)

    def skips(self, name: str) -> bool:
        """True if the tensor is published but not needed."""
        return any(re.fullmatch(pattern, name) for pattern in self.skip)


def alike_layers(config: Config, *, top_k: int | None = None) -> ModelShape:
    """Sizes of the routed experts where all layers have the same; `top_k` is for a config that does not say it."""
    experts = config.integer("num_local_experts", "num_experts")
    return ModelShape(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        top_k=config.integer("num_experts_per_tok", "experts_per_token", default=top_k, high=experts),
        vocab_size=config.integer("vocab_size"),
        layers=dict.fromkeys(range(config.integer("num_hidden_layers", high=1 << 16)), experts),
    )


def swiglu(prefix: str, width: int, hidden: int) -> dict[str, DenseSpec]:
    """The three matrices of a block between `hidden` and `width`."""
    return {
        f"{prefix}.gate_proj.weight": DenseSpec((width, hidden)),
        f"{prefix}.up_proj.weight": DenseSpec((width, hidden)),
        f"{prefix}.down_proj.weight": DenseSpec((hidden, width)),
    }


def decoder_dense(
    config: Config,
    *,
    head_dim: int,
    qk_norm: tuple[int, int] | None,
    attention_bias: bool,
    output_bias: bool | None = None,
) -> dict[str, DenseSpec]:
    """Embedding, attention, norms and head of a decoder with the names that Llama made common.

    Args:
        config: of the checkpoint.
        head_dim: width of one head.
        qk_norm: widths of the query and key norms, None if there are none.
        attention_bias: q, k, v and o projections have biases.
        output_bias: whether the o projection has one; None: as the others.
    """
    biased = {"q_proj": attention_bias, "k_proj": attention_bias, "v_proj": attention_bias}
    biased["o_proj"] = attention_bias if output_bias is None else output_bias
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    vocab = config.integer("vocab_size")
    widths = {
        "q_proj": (heads * head_dim, hidden),
        "k_proj": (kv_heads * head_dim, hidden),
        "v_proj": (kv_heads * head_dim, hidden),
        "o_proj": (hidden, heads * head_dim),
    }
    dense = {"model.embed_tokens.weight": DenseSpec((vocab, hidden))}
    for layer in range(config.integer("num_hidden_layers", high=1 << 16)):
        prefix = f"model.layers.{layer}"
        dense[f"{prefix}.input_layernorm.weight"] = DenseSpec((hidden,), keep_precision=True)
        for name, shape in widths.items():
            dense[f"{prefix}.self_attn.{name}.weight"] = DenseSpec(shape)
            if biased[name]:
                dense[f"{prefix}.self_attn.{name}.bias"] = DenseSpec(shape[:1], keep_precision=True)
        if qk_norm is not None:
            for name, width in zip(("q_norm", "k_norm"), qk_norm, strict=True):
                dense[f"{prefix}.self_attn.{name}.weight"] = DenseSpec((width,), keep_precision=True)
        dense[f"{prefix}.post_attention_layernorm.weight"] = DenseSpec((hidden,), keep_precision=True)
    dense["model.norm.weight"] = DenseSpec((hidden,), keep_precision=True)
    if not config.flag("tie_word_embeddings", default=False):
        dense["lm_head.weight"] = DenseSpec((vocab, hidden))
    return dense

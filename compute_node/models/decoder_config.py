"""What a decoder with routed experts is made of, in numbers; every family's config.json is read into this."""

from __future__ import annotations

from dataclasses import dataclass

from compute_node.kernels import RoutingRule
from compute_node.models.config_reader import ConfigReader
from compute_node.models.delta_net_sizes import DeltaNetSizes
from compute_node.models.latent_settings import IndexerSettings, LatentSettings
from compute_node.models.rope_settings import RopeSettings
from tierd.errors import StoreDamaged, UnsupportedModel
from tierd.store.geometry import Geometry

__all__ = ["DecoderConfig", "check_geometry", "head_sizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of a pre-norm decoder with routed SwiGLU experts.

    Attributes:
        family: name for people.
        vocab_size: rows of the embedding table and of the LM head.
        hidden_size: width of the residual stream, H.
        layers: number of decoder layers.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_dim: width of one query and key head.
        max_positions: the context length that the checkpoint was made for.
        rms_norm_eps: added to the mean square.
        rope: rotary embeddings.
        window: a position sees only the last `window` positions, itself included; None: all of them.
        unlimited_layers: layers whose attention sees all positions, whatever `window` says.
        attention_bias: whether q, k, v and o projections have a bias.
        query_key_norm: whether queries and keys are normalised, in families where checkpoints differ in that.
        clip_qkv: queries, keys and values are clamped to plus or minus this; None: not.
        tied_embeddings: the LM head is the embedding table.
        experts: routed experts of a layer.
        top_k: experts chosen per token.
        expert_width: I, the width of one expert.
        routing: how experts are chosen and weighted.
        dense_layers: layers with one dense SwiGLU block instead of experts.
        dense_width: its width; 0 where there is none.
        shared_width: width of the SwiGLU block that every token of an expert layer goes through; 0: there is none.
        centred_norms: layer and final norms store their weight less one.
        delta_net: linear attention in some layers, or None.
        latent: attention over a compressed cache, or None.
        indexer: which positions that attention reads, or None: all.
        kept: beginnings of the names of dense tensors that are stored but belong to no layer of the decoder.
        eos_token_ids: tokens that end an answer.
        bos_token_id: first token of a text, None if the family has none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeSettings
    window: int | None
    unlimited_layers: frozenset[int] = frozenset()
    attention_bias: bool
    query_key_norm: bool = False
    clip_qkv: float | None = None
    tied_embeddings: bool
    experts: int
    top_k: int
    expert_width: int
    routing: RoutingRule
    dense_layers: frozenset[int] = frozenset()
    dense_width: int = 0
    shared_width: int = 0
    centred_norms: bool = False
    delta_net: DeltaNetSizes | None = None
    latent: LatentSettings | None = None
    indexer: IndexerSettings | None = None
    kept: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UnsupportedModel(
                f"{self.family}: {self.heads} query heads are not a multiple of {self.kv_heads} key/value heads"
            )
        if self.top_k > self.experts:
            raise UnsupportedModel(f"{self.family}: num_experts_per_tok {self.top_k} of {self.experts} experts")

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers with routed experts, rising."""
        return tuple(layer for layer in range(self.layers) if layer not in self.dense_layers)


def head_sizes(read: ConfigReader, hidden_size: int) -> tuple[int, int, int]:
    """(heads, kv_heads, head_dim) with the defaults that all families share: kv_heads = heads, head_dim = H / heads."""
    heads = read.integer("num_attention_heads")
    kv_heads = read.integer("num_key_value_heads", default=heads)
    head_dim = read.optional_integer("head_dim")
    if head_dim is None:
        if hidden_size % heads:
            raise read.refuse("num_attention_heads", f"it does not divide hidden_size {hidden_size}")
        head_dim = hidden_size // heads
    return heads, kv_heads, head_dim


def check_geometry(config: DecoderConfig, geometry: Geometry) -> None:
    """Compares what config.json says with what the store holds; StoreDamaged names the first difference."""
    found = {entry.layer: entry.experts for entry in geometry.layers}
    pairs: tuple[tuple[str, object, object], ...] = (
        ("hidden size", config.hidden_size, geometry.hidden_size),
        ("expert width", config.expert_width, geometry.intermediate_size),
        ("top-k", config.top_k, geometry.top_k),
        ("layers with experts", config.expert_layers, tuple(found)),
        ("experts per layer", {config.experts}, set(found.values())),
    )
    for what, expected, stored in pairs:
        if expected != stored:
            raise StoreDamaged(
                f"the store's {what} is {stored}, its config.json says {expected}",
                hint="Convert the checkpoint again: store.json and config.json do not belong together.",
            )

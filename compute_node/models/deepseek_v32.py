"""DeepSeek-V3.2 (model_type `deepseek_v32`): DeepSeek-V3 whose attention reads the positions that an indexer chooses.

The indexer's rotary pairs lie half a rotary width apart, those of the attention are neighbours. Source:
configuration_deepseek_v32.py and modeling_deepseek_v32.py of transformers; DeepSeek-V3.2 report, arXiv:2512.02556.
"""

from __future__ import annotations

from compute_node.models.config_reader import ConfigReader
from compute_node.models.decoder_config import DecoderConfig
from compute_node.models.deepseek_v3 import cache_layout, decoder_layer, leading_dense_layers, read_latent_config
from compute_node.models.latent_settings import IndexerSettings

__all__ = ["cache_layout", "decoder_layer", "read_config", "read_indexer"]


def read_config(read: ConfigReader) -> DecoderConfig:
    """Sizes and switches from config.json, with the defaults of DeepseekV32Config."""
    layers = read.integer("num_hidden_layers")
    return read_latent_config(
        read,
        "DeepSeek-V3.2",
        dense_layers=leading_dense_layers(read, layers),
        groups=(8, 4),
        indexer=read_indexer(read, layers, heads=64, interleaved=False, shared_layers=frozenset()),
        theta=10000.0,
        rms_norm_eps=1e-6,
        max_positions=163840,
    )


def read_indexer(
    read: ConfigReader, layers: int, *, heads: int, interleaved: bool, shared_layers: frozenset[int]
) -> IndexerSettings:
    """Sizes of the indexer.

    Args:
        read: the config.
        layers: of the model.
        heads: where the config says nothing.
        interleaved: layout of the family's rotary pairs in the indexer.
        shared_layers: layers without an indexer of their own.
    """
    kinds = read.choices("layer_types", ("indexed_attention", "deepseek_sparse_attention"))
    if kinds is not None and len(kinds) != layers:
        raise read.refuse("layer_types", f"one entry for each of {layers} layers is expected")
    if read.boolean("indexer_rope_interleave", default=interleaved) is not interleaved:
        raise read.refuse("indexer_rope_interleave", f"the family has {str(interleaved).lower()}")
    if read.optional_integer("q_lora_rank") is None:
        raise read.refuse("q_lora_rank", "an indexer needs the compressed query")
    head_dim, rotary = read.integer("index_head_dim", default=128), read.integer("qk_rope_head_dim")
    if head_dim < rotary:
        raise read.refuse("index_head_dim", f"it is smaller than the {rotary} elements that are turned")
    return IndexerSettings(
        heads=read.integer("index_n_heads", default=heads),
        head_dim=head_dim,
        top_k=read.integer("index_topk", default=2048),
        interleaved=interleaved,
        shared_layers=shared_layers,
    )

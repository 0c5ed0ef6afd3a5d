"""GLM-5 (model_type `glm_moe_dsa`): latent attention with an indexer that several layers may share.

Source: configuration_glm_moe_dsa.py and modeling_glm_moe_dsa.py of transformers; sharing: arXiv:2603.12201.
"""

from __future__ import annotations

from compute_node.models.config_reader import ConfigReader
from compute_node.models.decoder_config import DecoderConfig
from compute_node.models.deepseek_v3 import cache_layout, decoder_layer, leading_dense_layers, read_latent_config
from compute_node.models.deepseek_v32 import read_indexer

__all__ = ["cache_layout", "decoder_layer", "read_config"]


def read_config(read: ConfigReader) -> DecoderConfig:
    """Sizes and switches from config.json, with the defaults of GlmMoeDsaConfig."""
    layers = read.integer("num_hidden_layers")
    if not read.boolean("rope_interleave", default=True):
        raise read.refuse("rope_interleave", "the family's rotary pairs are neighbours")
    shared = _shared_layers(read, layers)
    return read_latent_config(
        read,
        "GLM-5",
        dense_layers=leading_dense_layers(read, layers),
        groups=(1, 1),
        indexer=read_indexer(read, layers, heads=32, interleaved=True, shared_layers=shared),
        theta=10000.0,
        rms_norm_eps=1e-5,
        max_positions=202752,
    )


def _shared_layers(read: ConfigReader, layers: int) -> frozenset[int]:
    """Layers that read what a lower one chose: a list, a pattern of F and S, or a period behind an offset."""
    kinds = read.choices("indexer_types", ("full", "shared"))
    period = read.integer("index_topk_freq", default=1)
    offset = read.integer("index_skip_topk_offset", default=2, minimum=0)
    pattern = read.value("index_topk_pattern")
    name = "indexer_types"
    if kinds is None and pattern is not None:
        name = "index_topk_pattern"
        known = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}
        if not isinstance(pattern, str | list) or not all(isinstance(kind, str) and kind in known for kind in pattern):
            raise read.refuse(name, "letters F and S are expected, one for each layer")
        kinds = [known[kind] for kind in pattern]
    if kinds is None:
        kinds = ["full" if max(layer - offset + 1, 0) % period == 0 else "shared" for layer in range(layers)]
    if len(kinds) != layers:
        raise read.refuse(name, f"one entry for each of {layers} layers is expected")
    if kinds[0] == "shared":
        raise read.refuse(name, "the first layer has no lower one to share with")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "shared")

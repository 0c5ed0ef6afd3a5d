"""Qwen3.5 and Qwen3.6 (model_type `qwen3_5_moe_text`, composite `qwen3_5_moe`): the layers of Qwen3-Next.

Their rotary embeddings have three axes (text, height, width), which are one and the same for text. Source:
configuration_qwen3_5_moe.py and modeling_qwen3_5_moe.py of transformers.
"""

from __future__ import annotations

from compute_node.models.config_reader import ConfigReader
from compute_node.models.decoder_config import DecoderConfig
from compute_node.models.qwen3_next import cache_layout, decoder_layer, read_hybrid

__all__ = ["cache_layout", "decoder_layer", "read_config"]


def read_config(read: ConfigReader) -> DecoderConfig:
    """Sizes and switches from the text part of config.json, with the defaults of Qwen3_5MoeTextConfig."""
    for drafting in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        read.value(drafting)
    if not read.boolean("norm_topk_prob", default=True):
        raise read.refuse("norm_topk_prob", "the family always renormalises")
    return read_hybrid(read, "Qwen3.5-MoE", layers=40, experts=256, top_k=8, vocab_size=248320, fused=False)

"""A store with the sizes of OLMoE-1B-7B and random weights, made once and kept in the user's cache.

Sizes from the checkpoint's config.json (allenai/OLMoE-1B-7B-0924; Muennighoff et al. 2024, arXiv 2409.02060). Fewer
layers than its sixteen keep their shape; the vocabulary shrinks with them, so that the head keeps its share of a step.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierd.errors import UsageError
from tierd.sizes import format_bytes
from tierd.store.store import ExpertStore
from tierd.store.synthetic import make_store

__all__ = ["LAYERS", "olmoe_store"]

LAYERS: Final = 16
_HIDDEN, _WIDTH, _EXPERTS, _TOP_K, _HEADS, _VOCABULARY = 2048, 1024, 64, 8, 16, 50304
_FORMAT: Final = "int4-g64"
# Of an expert in int4-g64: half a byte and a float16 scale per 64 for each of three matrices.
_EXPERT_BYTES: Final = 3 * _HIDDEN * _WIDTH * (32 + 2) // 64


def olmoe_store(layers: int) -> ExpertStore:
    """The store, converted at the first call.

    Args:
        layers: 1 to 16.

    Raises:
        UsageError: another number of layers, or no room on the disk of the cache.
    """
    if not 1 <= layers <= LAYERS:
        raise UsageError(f"--layers {layers} is outside 1 to {LAYERS}, the layers of OLMoE-1B-7B")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierd" / "bench"
    path = cache / f"olmoe-1b-7b-{layers}-{_FORMAT}"
    if path.exists():
        return ExpertStore.open(path)
    cache.mkdir(parents=True, exist_ok=True)
    needed, free = layers * _EXPERTS * _EXPERT_BYTES * 5 // 4, shutil.disk_usage(cache).free
    if free < needed:
        raise UsageError(
            f"the store of the bench takes {format_bytes(needed)}, {cache} has {format_bytes(free)} left",
            hint="Give fewer --layers, or set XDG_CACHE_HOME to a larger disk.",
        )
    with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as scratch:
        made = Path(scratch) / "store"
        config = _config(layers)
        make_store(
            made,
            layers=layers,
            experts=_EXPERTS,
            top_k=_TOP_K,
            hidden=_HIDDEN,
            intermediate=_WIDTH,
            format=_FORMAT,
            dense=_dense(layers, config["vocab_size"]),
            config=config,
        )
        made.rename(path)
    return ExpertStore.open(path)


def _config(layers: int) -> dict[str, Any]:
    return {
        "model_type": "olmoe",
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": _WIDTH,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "num_attention_heads": _HEADS,
        "num_experts": _EXPERTS,
        "num_experts_per_tok": _TOP_K,
        "num_hidden_layers": layers,
        "num_key_value_heads": _HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": _VOCABULARY * layers // LAYERS,
    }


def _dense(layers: int, vocabulary: int) -> dict[str, NDArray[Any]]:
    """All dense tensors as bits of bf16."""
    rng = np.random.Generator(np.random.Philox(key=7))

    def weights(*shape: int) -> NDArray[np.uint16]:
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5)
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    def ones() -> NDArray[np.uint16]:
        return np.full(_HIDDEN, 0x3F80, np.uint16)

    dense = {
        "model.embed_tokens.weight": weights(vocabulary, _HIDDEN),
        "lm_head.weight": weights(vocabulary, _HIDDEN),
        "model.norm.weight": ones(),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        for projection in "qkvo":
            dense[f"{name}.self_attn.{projection}_proj.weight"] = weights(_HIDDEN, _HIDDEN)
        for norm in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"):
            dense[f"{name}.{norm}.weight"] = ones()
        dense[f"{name}.mlp.gate.weight"] = weights(_EXPERTS, _HIDDEN)
    return dense

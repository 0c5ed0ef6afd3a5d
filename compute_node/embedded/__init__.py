"""The embedded model: a small Qwen3-MoE trained for this project, see MODEL_CARD.md."""

from __future__ import annotations

from pathlib import Path

__all__ = ["path"]


def path() -> Path:
    """The model's folder: config, tokenizer and two bfloat16 shards, as transformers writes them."""
    return Path(__file__).resolve().parent

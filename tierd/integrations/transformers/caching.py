"""A model's own cache of keys and values, whose name differs from version to version of transformers."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["cache_of", "with_cache"]


def with_cache(model: Any, past: Any) -> dict[str, Any]:
    """Arguments of a forward pass that goes on from `past`; None: one that begins."""
    if past is None:
        return {"use_cache": True}
    names = inspect.signature(model.forward).parameters
    return {"use_cache": True, "cache" if "cache" in names else "past_key_values": past}


def cache_of(answer: Any) -> Any:
    """The cache in the answer of a forward pass; None if the model keeps none."""
    past = getattr(answer, "cache", None)
    return past if past is not None else getattr(answer, "past_key_values", None)

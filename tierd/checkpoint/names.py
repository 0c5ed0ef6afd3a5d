"""One name for each tensor of a known family, whatever stands before it where it was published.

Composites put their text model under a name of its own; the canonical names are those of the text model alone.
"""

from __future__ import annotations

from typing import Final

__all__ = ["canonical_name"]

_PREFIXES: Final = (
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""Beginnings of names, the longer ones first, and what they mean."""


def canonical_name(name: str) -> str:
    """The name of a tensor in a text model."""
    for published, canonical in _PREFIXES:
        if name.startswith(published):
            return canonical + name.removeprefix(published)
    return name

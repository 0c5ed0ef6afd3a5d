"""Typed access to a checkpoint's config.json; a missing or odd value is refused by name, never guessed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tierd.errors import StoreDamaged, UnsupportedModel
from tierd.store.manifest import CONFIG_FILE
from tierd.store.reading import read_small_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Config", "text_settings"]

MAX_CONFIG_BYTES: Final = 4 << 20

_COMPOSITES: Final = ("kimi_k25", "qwen3_5_moe")
_SHARED: Final = ("bos_token_id", "eos_token_id", "quantization_config", "tie_word_embeddings")
"""Settings of a composite that also hold for its text model, unless that has its own."""


def text_settings(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the text model: `text_config` of a known composite, with its own `model_type`; else all."""
    text = table.get("text_config")
    if table.get("model_type") not in _COMPOSITES or not isinstance(text, dict):
        return table
    return {name: table[name] for name in ("model_type", *_SHARED) if table.get(name) is not None} | text


class Config:
    """The content of config.json.

    Attributes:
        table: the JSON object, or the part of it that describes the text model.
        where: the file, for messages.
        composite: the text model was found inside a model with more to it, such as vision.
    """

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self.table = text_settings(table)
        self.where = where
        self.composite = self.table is not table

    @classmethod
    def read(cls, folder: Path) -> Config:
        """Reads `config.json` of a checkpoint; StoreDamaged if it is missing or no JSON object."""
        path = folder / CONFIG_FILE
        data = read_small_file(path, MAX_CONFIG_BYTES)
        try:
            table = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise StoreDamaged(f"{path} is not JSON: {str(error)[:200]}") from None
        if not isinstance(table, dict):
            raise StoreDamaged(f"{path} is not a JSON object")
        return cls(table, str(path))

    @property
    def model_type(self) -> str:
        """The family's own name, e.g. "qwen3_moe"."""
        value = self.table.get("model_type")
        if not isinstance(value, str):
            raise UnsupportedModel(f"{self.where}: model_type is missing")
        return value

    def integer(self, *names: str, default: int | None = None, low: int = 1, high: int = 1 << 24) -> int:
        """The first of `names` that is present (configs have aliases), between `low` and `high`.

        Raises:
            UnsupportedModel: absent without a default, not a whole number, or out of range.
        """
        for name in names:
            value = self.table.get(name)
            if value is None:
                continue
            if type(value) is not int or not low <= value <= high:
                raise UnsupportedModel(f"{self.where}: {name} is {value!r}; a number from {low} to {high} is wanted")
            return value
        if default is None:
            raise UnsupportedModel(f"{self.where}: {' or '.join(names)} is missing")
        return default

    def flag(self, name: str, *, default: bool) -> bool:
        """A boolean; UnsupportedModel if it is something else."""
        value = self.table.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UnsupportedModel(f"{self.where}: {name} is {value!r}; true or false is wanted")
        return value

    def integers(self, name: str) -> list[int]:
        """A list of numbers, empty if absent; UnsupportedModel if it is something else."""
        value = self.table.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise UnsupportedModel(f"{self.where}: {name} is not a list of numbers")
        return list(value)

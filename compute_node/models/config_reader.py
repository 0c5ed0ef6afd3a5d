"""Strict reading of a checkpoint's config.json: a setting that could change the maths is understood or refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from tierd.errors import UnsupportedModel

__all__ = ["ConfigReader", "parse_config"]

_NEUTRAL: Final = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "dtype",
        "initializer_range",
        "max_window_layers",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "quantization_config",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Settings of training, bookkeeping or storage: inference computes the same whatever they say."""

_LIMIT: Final = 1 << 24


def parse_config(content: bytes) -> dict[str, Any]:
    """The JSON object in a config file; UnsupportedModel if it is not one."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"config.json is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise UnsupportedModel("config.json is not a JSON object")
    return data


class ConfigReader:
    """Reads settings by name, remembers which were read, and refuses what is left over.

    Every error is an UnsupportedModel that names the setting and the family.
    """

    def __init__(self, config: Mapping[str, Any], family: str) -> None:
        self.family = family
        self._config = config
        self._read: set[str] = set(_NEUTRAL) | {"model_type"}

    def value(self, *names: str) -> Any:
        """The first setting of `names` that is present and not null; None if none is."""
        self._read.update(names)
        found = [(name, self._config[name]) for name in names if self._config.get(name) is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise self.refuse(name, f"it contradicts {found[0][0]}")
        return found[0][1] if found else None

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number between `minimum` and 2^24; `default` where the setting is absent or null."""
        value = self.value(*names)
        if value is None:
            if default is None:
                raise UnsupportedModel(f"{self.family}: config.json lacks {names[0]!r}")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= _LIMIT:
            raise self.refuse(names[0], f"a whole number from {minimum} to {_LIMIT} is expected")
        return value

    def optional_integer(self, name: str) -> int | None:
        """A whole number from 1 to 2^24, or None where the setting is absent or null."""
        return None if self.value(name) is None else self.integer(name)

    def number(self, name: str, default: float) -> float:
        """A finite number above zero; `default` where the setting is absent or null."""
        value = self.optional_number(name)
        return default if value is None else value

    def optional_number(self, name: str) -> float | None:
        """A finite number above zero, or None where the setting is absent or null."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise self.refuse(name, "a number above zero is expected")
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        """True or false; `default` where the setting is absent or null."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false is expected")
        return value

    def layer_numbers(self, name: str, layers: int) -> frozenset[int]:
        """A list of layer numbers, 0 to layers - 1; empty where the setting is absent or null."""
        value = self.value(name)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < layers for item in value):
            raise self.refuse(name, f"a list of layer numbers from 0 to {layers - 1} is expected")
        return frozenset(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id or a list of them; empty where the setting is absent or null."""
        value = self.value(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int and item >= 0 for item in ids):
            raise self.refuse(name, "a token id or a list of token ids is expected")
        return tuple(ids)

    def first_token_id(self, name: str) -> int | None:
        """A token id, the first of a list of them, or None where the setting is absent, null or an empty list."""
        return next(iter(self.token_ids(name)), None)

    def silu(self) -> None:
        """Requires `hidden_act` to be SiLU, under either of its names."""
        if self.value("hidden_act") not in (None, "silu", "swish"):
            raise self.refuse("hidden_act", "only silu is known")

    def choices(self, name: str, known: tuple[str, ...]) -> list[str] | None:
        """A list of names out of `known`, such as one kind for each layer; None where the setting is absent or null."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(item in known for item in value):
            raise self.refuse(name, f"a list of {' and '.join(known)} is expected")
        return list(value)

    def finish(self) -> None:
        """Refuses settings that nobody read, unless they are switched off (null, false, empty)."""
        for name, value in self._config.items():
            if name not in self._read and value not in (None, False, "", [], {}):
                raise self.refuse(name, "this setting is not known, and it may change what the model computes")

    def refuse(self, name: str, reason: str, value: Any = None) -> UnsupportedModel:
        """An error that names the setting and shows the value found."""
        shown = json.dumps(self._config.get(name) if value is None else value, default=str)
        return UnsupportedModel(f"{self.family}: config.json sets {name} to {shown[:200]}: {reason}")

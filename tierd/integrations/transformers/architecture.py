"""From a checkpoint's config.json to the model class of transformers, and to an empty model of it."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from tierd.errors import UnsupportedModel

__all__ = ["config_of", "empty_model", "model_class", "quiet", "text_config"]


def config_of(folder: Path) -> Any:
    """The config of a folder with config.json; UnsupportedModel if transformers does not know its model_type."""
    try:
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises ValueError, KeyError, OSError and its own kinds
        raise UnsupportedModel(
            f"{folder / 'config.json'} is no config that transformers {transformers.__version__} knows: "
            f"{str(error).splitlines()[0][:200]}",
            hint="A newer version of transformers may know this model; code of a checkpoint's own is never run.",
        ) from error


def text_config(config: Any) -> Any:
    """The part of a config that describes the language model."""
    return config.get_text_config(decoder=True)


def model_class(config: Any) -> type[Any]:
    """The class that `architectures` names, else the one that transformers has for causal language models."""
    names = list(config.architectures or [])
    for name in names:
        found = getattr(transformers, name, None) or _from_modeling_file(config, name)
        if found is not None:
            return found
    try:
        return transformers.AutoModelForCausalLM._model_mapping[type(config)]  # type: ignore[no-any-return]  # noqa: SLF001
    except KeyError:
        raise UnsupportedModel(
            f"transformers {transformers.__version__} has no model class for {names or type(config).__name__}"
        ) from None


def empty_model(config: Any) -> Any:
    """A model on the meta device: names and shapes, no memory."""
    config = type(config).from_dict(config.to_dict())
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    with torch.device("meta"), quiet():
        return model_class(config)._from_config(config)  # noqa: SLF001


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps progress bars, reports and warnings of transformers off standard error; errors still raise."""
    verbosity = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()


def _from_modeling_file(config: Any, name: str) -> type[Any] | None:
    """Some classes are not exported by the package itself."""
    module = type(config).__module__.replace("configuration_", "modeling_")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        logging.getLogger(__name__).debug("%s cannot be imported", module)
        return None

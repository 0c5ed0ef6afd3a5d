"""Which engine runs a store: the native program of its family, or the authors' own code in transformers."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from compute_node.commands.applied_settings import model_options
from compute_node.engine.language_model import LanguageModel
from compute_node.engine.model import Model
from compute_node.models.config_reader import parse_config
from compute_node.models.registry import family_of
from compute_node.settings import NodeSettings
from tierd.client.source import ExpertSource, StoreView
from tierd.errors import UnsupportedModel
from tierd.extras import install_hint

__all__ = ["NATIVE", "TRANSFORMERS", "check_installed", "choose_engine", "make_model"]

NATIVE, TRANSFORMERS = "native", "transformers"


def check_installed() -> None:
    """UnsupportedModel unless the packages of the engine `transformers` are there."""
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            raise UnsupportedModel(
                f"--engine transformers needs {package}, which is not installed", hint=install_hint("torch")
            )


def choose_engine(store: StoreView, wanted: str) -> tuple[str, str]:
    """`native` or `transformers` for a store, and why it is not the native one (empty otherwise).

    Args:
        store: to be run.
        wanted: `auto`: the native program if there is one; else one of the two.

    Raises:
        UnsupportedModel: the native program is wanted, and there is none.
    """
    if wanted == TRANSFORMERS:
        return TRANSFORMERS, "as --engine says"
    why = _not_native(store)
    if why is None:
        return NATIVE, ""
    if wanted == NATIVE:
        raise UnsupportedModel(why.message, hint="Use --engine transformers, or leave --engine out.")
    return TRANSFORMERS, why.message


def make_model(source: ExpertSource, settings: NodeSettings, *, engine: str, serving: bool) -> LanguageModel:
    """The model of a store in an engine that `choose_engine` named.

    Raises:
        UnsupportedModel: the model cannot be run, or what the engine needs is not installed.
    """
    if engine == NATIVE:
        return Model(source, model_options(settings, serving=serving))
    check_installed()
    engine_module = import_module("compute_node.engine.transformers_model")
    options = engine_module.TransformersOptions(
        device=settings.device,
        vram=settings.vram,
        context=settings.context,
        sequences=settings.max_running if serving else 1,
        threads=settings.threads,
        prefetch=settings.prefetch == "on",
    )
    model: LanguageModel = engine_module.TransformersModel(source, options)
    return model


def _not_native(store: StoreView) -> UnsupportedModel | None:
    if store.manifest.interface is not None:
        return UnsupportedModel(f"{store.manifest.interface.architecture} has no native program")
    try:
        family_of(parse_config(store.read_file("config.json")))
    except UnsupportedModel as error:
        return error
    return None

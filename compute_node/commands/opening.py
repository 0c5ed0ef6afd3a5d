"""Opens what a command's STORE names: an expert source, the model on it, and its tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from rich.console import Console

from compute_node.commands.applied_settings import far_options, idle_far_options
from compute_node.commands.engine_choice import NATIVE, TRANSFORMERS, check_installed, choose_engine, make_model
from compute_node.commands.options import check_device
from compute_node.engine.arithmetic import named_numerics
from compute_node.engine.generate import Generator
from compute_node.engine.kernel_path import kernel_path
from compute_node.engine.language_model import LanguageModel
from compute_node.engine.model import Model
from compute_node.prediction.hinting import Hinting
from compute_node.prediction.table_file import PREDICTOR, TableFile
from compute_node.settings import NodeSettings
from compute_node.text.tokenizer import Tokenizer
from tierd.client.arena_source import ArenaSource
from tierd.client.daemon_stats import DaemonStats, fetch_stats
from tierd.client.loop_thread import LoopThread
from tierd.client.open import open_source
from tierd.client.private_daemon import PrivateDaemon
from tierd.client.source import ExpertSource, StoreView
from tierd.errors import TierdError
from tierd.profiles import load_profile
from tierd.sizes import format_bytes, format_count
from tierd.state import state_directory

__all__ = ["Opened", "daemon_stats", "open_store"]

_STATS_SECONDS = 6.0


@dataclass(frozen=True, slots=True)
class Opened:
    """A store that is ready to generate.

    Attributes:
        source: where the experts come from.
        model: loaded on it.
        tokenizer: of the store; None if it has none.
        generator: over both.
        kernel_path: name of the machine code that computes.
    """

    source: ExpertSource
    model: LanguageModel
    tokenizer: Tokenizer | None
    generator: Generator
    kernel_path: str

    def headline(self) -> str:
        """One line that says what is running."""
        manifest, config = self.source.store.manifest, self.model.config
        layers = manifest.geometry.layers
        return (
            f"{config.family} · {format_count(config.layers, 'layer')}, {len(layers)} with {config.experts} experts, "
            f"top-{config.top_k}, {manifest.expert_format} · {self.model.numerics} · "
            f"{format_count(self.model.threads, 'thread')} ({self.kernel_path})"
        )


@contextmanager
def open_store(
    store: str,
    settings: NodeSettings,
    *,
    name: str,
    serving: bool = False,
    daemon: PrivateDaemon | None = None,
    console: Console | None = None,
    check: Callable[[StoreView, Tokenizer | None], None] | None = None,
) -> Iterator[Opened]:
    """Opens STORE and loads its dense weights; closes everything, a private daemon included, at the end.

    Args:
        store: a directory, `unix:PATH`, or `host:port`.
        settings: numerics, threads, context, arena, in-process, and how far daemons are reached.
        name: of this node, for the daemon's logs.
        serving: the model has a place for as many sequences as may run at once, instead of one.
        daemon: of `early_daemon`, for this store and these settings; None: what a directory needs is started here.
        console: shows on a terminal that something is being loaded.
        check: refuses a store that the command has no use for, before its weights are loaded.

    Raises:
        TierdError: of the store, the daemon, or the model.
    """
    if settings.engine == TRANSFORMERS:
        check_installed()
    _say(idle_far_options(store, settings))
    path = kernel_path()
    source = open_source(
        store,
        in_process=settings.in_process,
        arena=settings.arena,
        patience=settings.patience,
        messages=settings.messages,
        far=far_options(settings),
        daemon=daemon,
        name=name,
        numerics=named_numerics(settings.numerics),
        kernel_path=path,
    )
    with closing(source):
        settings = _tuned(settings, source.store.fingerprint)
        engine, why = choose_engine(source.store, settings.engine)
        check_device(engine, settings)
        if engine != NATIVE:
            path = "transformers"
            _say(f"the engine is {engine}: {why}")
        tokenizer = Tokenizer.from_store(source.store)
        if check is not None:
            check(source.store, tokenizer)
        if console is not None and console.is_terminal:
            with console.status(f"loading {format_bytes(source.store.manifest.dense_bytes)} of dense weights"):
                model = make_model(source, settings, engine=engine, serving=serving)
        else:
            model = make_model(source, settings, engine=engine, serving=serving)
        tables = None
        if settings.history and source.step_memory is not None and isinstance(model, Model):
            tables = TableFile(state_directory() / "nodes", source.store.fingerprint)
            if isinstance(model.hinting, Hinting):
                fitted = TableFile(state_directory() / "nodes", source.store.fingerprint, PREDICTOR)
                _say(fitted.load(model.hinting.guesses))
        with closing(model), _remembering(tables, model):
            yield Opened(source, model, tokenizer, Generator(model, tokenizer), path)


def _tuned(settings: NodeSettings, fingerprint: str) -> NodeSettings:
    """The settings, with what `tierd tune` found for this store on this machine below all that was said."""
    if settings.profile == "off":
        return settings
    profile, problem = load_profile(fingerprint)
    _say(problem)
    if profile is None:
        return settings
    found = profile.node.model_dump(exclude_none=True, exclude=settings.model_fields_set)
    return settings.model_copy(update=found)


def daemon_stats(source: ExpertSource) -> DaemonStats | None:
    """What the source's daemon counts and has now; None without a daemon, or if it does not answer."""
    if not isinstance(source, ArenaSource):
        return None
    try:
        asking = fetch_stats(source.address, source.access)
        return LoopThread.shared().run(asking, seconds=_STATS_SECONDS, what="the daemon's counts")
    except TierdError:
        return None


@contextmanager
def _remembering(tables: TableFile | None, model: LanguageModel) -> Iterator[None]:
    """Goes on from the token tables of earlier runs, and leaves them to later ones."""
    if tables is None or not isinstance(model, Model):
        yield
        return
    _say(tables.load(model.token_table))
    try:
        yield
    finally:
        if model.token_table.counted:
            _say(tables.save(model.token_table))


def _say(problem: str) -> None:
    if problem:
        print(f"compute-node: {problem}", file=sys.stderr)

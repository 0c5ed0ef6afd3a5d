"""`compute-node fit-predictor`: learn from recorded runs how routers of later layers will choose."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from compute_node.commands import options
from compute_node.commands.opening import Opened, open_store
from compute_node.engine.model import Model
from compute_node.prediction.fitting import fit_guesses
from compute_node.prediction.table_file import PREDICTOR, TableFile
from tierd.errors import TierdError, UsageError
from tierd.option_tables import Given, with_options
from tierd.policy.trace import load_trace
from tierd.state import state_directory

__all__ = ["fit_predictor", "register"]

_LEAST_TOKENS: Final = 8
"""Shorter texts tell nothing."""
_MOST_TOKENS: Final = 1 << 18


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("fit-predictor")(fit_predictor)


@with_options(given=options.RUN)
def fit_predictor(
    store: options.Store,
    traces: Annotated[list[Path], typer.Argument(help="Runs recorded with --trace.", show_default=False)],
    *,
    residency: Annotated[
        float, typer.Option("--residency", min=0.01, max=0.99, help="Share of the experts taken to be in RAM.")
    ] = 0.25,
    tokens: Annotated[
        int, typer.Option("--tokens", min=64, max=_MOST_TOKENS, help="Most tokens to learn from.")
    ] = 8192,
    given: Given,
    config: options.Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Fit, for each layer, a linear correction of its router's look-ahead on the texts of recorded runs.

    One text in four is held out, and says whether the fit foresees more than learning online does. If so, it is saved
    in the user's state directory, and every later run with --prefetch begins from it.
    """
    settings = options.load_settings(config, given)
    console = Console(stderr=True, highlight=False)
    with open_store(store, settings, name="fit-predictor", console=console) as opened:
        if not isinstance(opened.model, Model):
            raise UsageError("this model's engine does not look ahead, so there is nothing to fit")
        fit = fit_guesses(
            opened.model,
            _texts(traces, opened, tokens),
            residency=residency,
            tell=lambda line: console.print(f"  {line}", style="dim") if console.is_terminal else None,
        )
        file = TableFile(state_directory() / "nodes", opened.source.store.fingerprint, PREDICTOR)
        if fit.pays and (problem := file.save(fit.guesses)):
            raise TierdError(problem)
    report = fit.report | {"saved": str(file.path) if fit.pays else None}
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        _show(report)


def _texts(traces: list[Path], opened: Opened, most: int) -> list[NDArray[np.int64]]:
    """The texts of the traces, each cut to the context, `most` tokens together; UsageError if they are too few."""
    geometry = opened.source.store.manifest.geometry
    found: list[NDArray[np.int64]] = []
    for path in traces:
        trace = load_trace(path)
        if trace.layer_experts != tuple(entry.experts for entry in geometry.layers):
            raise UsageError(f"{path} was recorded with another model", hint="Record it with this store and --trace.")
        if len(trace) and not 0 <= int(trace.tokens.min()) <= int(trace.tokens.max()) < opened.model.config.vocab_size:
            raise UsageError(f"{path} names tokens that this model does not have")
        bounds = np.flatnonzero(np.diff(trace.sequences)) + 1
        found += [text[: opened.model.context] for text in np.split(trace.tokens.astype(np.int64), bounds)]
    texts: list[NDArray[np.int64]] = []
    for text in found:
        part = text[: most - sum(map(len, texts))]
        if len(part) >= _LEAST_TOKENS:
            texts.append(part)
    if len(texts) < 2:
        raise UsageError(
            f"the traces hold {len(texts)} texts of at least {_LEAST_TOKENS} tokens; one to learn from and one to be "
            "judged on are needed",
            hint="Record more runs: compute-node generate … --trace FILE.",
        )
    return texts


def _show(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    for line in (
        f"recall on misses    {report['recall_on_misses']:.3f} fitted, on texts that were held out",
        f"learning online     {report['unfitted_recall_on_misses']:.3f}",
        f"plain next router   {report['baseline_recall_on_misses']:.3f}",
        f"saved               {report['saved'] or 'nothing, since the fit finds no more than learning online does'}",
    ):
        console.print(line, markup=False, soft_wrap=True)

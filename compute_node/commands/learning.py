"""What `compute-node fit-predictor` does: it learns from recorded runs how routers of later layers will choose."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from compute_node.commands.opening import Opened, open_store
from compute_node.engine.model import Model
from compute_node.prediction.fitting import fit_guesses
from compute_node.prediction.table_file import PREDICTOR, TableFile
from compute_node.settings import NodeSettings
from tierd.client.private_daemon import PrivateDaemon
from tierd.errors import TierdError, UsageError
from tierd.policy.trace import load_trace
from tierd.state import state_directory

__all__ = ["learn_from"]

_LEAST_TOKENS: Final = 8
"""Shorter texts tell nothing."""


def learn_from(
    traces: list[Path],
    store: str,
    settings: NodeSettings,
    *,
    daemon: PrivateDaemon | None,
    residency: float,
    tokens: int,
    as_json: bool,
) -> None:
    """Fits, keeps what foresees more than learning online, and prints what was found.

    Args:
        traces: recorded runs.
        store: as it was named.
        settings: of the node.
        daemon: that was begun for the store; see `open_store`.
        residency: share of the experts taken to be in RAM.
        tokens: most tokens to learn from.
        as_json: prints one JSON object instead of text.

    Raises:
        UsageError: traces of another model, or too few texts; TierdError of the store, or if nothing can be saved.
    """
    console = Console(stderr=True, highlight=False)
    with open_store(store, settings, name="fit-predictor", daemon=daemon, console=console) as opened:
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

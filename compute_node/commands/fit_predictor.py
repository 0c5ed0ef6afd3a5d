"""`compute-node fit-predictor`: learn from recorded runs how routers of later layers will choose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from compute_node.commands import options
from tierd.client.own_daemon import early_daemon
from tierd.option_tables import Given, with_options

__all__ = ["fit_predictor", "register"]

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
    with early_daemon(store, in_process=settings.in_process, arena=settings.arena) as daemon:
        # The kernels take seconds to import, which --help need not wait for.
        from compute_node.commands.learning import learn_from  # noqa: PLC0415

        learn_from(traces, store, settings, daemon=daemon, residency=residency, tokens=tokens, as_json=as_json)

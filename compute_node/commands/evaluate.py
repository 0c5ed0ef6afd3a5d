"""`compute-node eval`: the perplexity of a text, or which of several continuations a model finds likeliest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compute_node.commands import options
from tierd.client.own_daemon import early_daemon
from tierd.option_tables import Given, with_options

__all__ = ["evaluate", "register"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("eval")(evaluate)


@with_options(given=options.RUN)
def evaluate(
    file: Annotated[Path, typer.Argument(help="UTF-8 text; or JSON lines with --choices.")],
    store: options.Store,
    *,
    config: options.Config = None,
    given: Given,
    overlap: Annotated[
        int | None, typer.Option("--overlap", help="Tokens that a window repeats of the last. Default: half of it.")
    ] = None,
    choices: Annotated[
        bool,
        typer.Option("--choices", help='Lines {"context": TEXT, "choices": [TEXT, ...], "answer": NUMBER}.'),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Judge a store and its numerics: how well does the model predict a text?"""
    settings = options.load_settings(config, given)
    with early_daemon(store, in_process=settings.in_process, arena=settings.arena) as daemon:
        # The kernels take seconds to import, which --help need not wait for.
        from compute_node.commands.judging import judge_model  # noqa: PLC0415

        judge_model(file, store, settings, daemon=daemon, overlap=overlap, choices=choices, as_json=as_json)

"""`compute-node chat`: a conversation at the terminal; the KV cache is kept from turn to turn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compute_node.commands import options
from compute_node.commands.far_options import FAR
from tierd.client.own_daemon import early_daemon
from tierd.option_tables import Given, with_options

__all__ = ["chat", "register"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("chat")(chat)


@with_options(given=options.SAMPLING | options.MODEL | FAR)
def chat(
    store: options.Store,
    *,
    system: Annotated[str | None, typer.Option("--system", help="System message of the conversation.")] = None,
    session: Annotated[
        Path | None,
        typer.Option(
            "--session", metavar="FILE", help="Keep the conversation here, and go on with it where it is there already."
        ),
    ] = None,
    given: Given,
    seed: options.Seed = None,
    config: options.Config = None,
) -> None:
    """Talk with a model. Ctrl-C stops an answer; /help shows the commands."""
    settings = options.load_settings(config, given, seed=seed)
    with early_daemon(store, in_process=settings.in_process, arena=settings.arena) as daemon:
        # The kernels take a second to import, which --help need not wait for.
        from compute_node.commands.talking import talk  # noqa: PLC0415

        talk(store, settings, daemon=daemon, system=system, session=session)

"""`tierd metrics --doc`: what the daemon's metrics mean."""

from __future__ import annotations

from typing import Annotated

import typer

from tierd.errors import UsageError

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(metrics)


def metrics(
    *,
    doc: Annotated[bool, typer.Option("--doc", help="Print the reference table, in Markdown.")] = False,
) -> None:
    """Explain the metrics that a daemon shows at /metrics."""
    if not doc:
        raise UsageError(
            "metrics: a daemon shows its metrics at http://HOST:PORT/metrics, see `tierd serve --http`",
            hint="`tierd metrics --doc` prints what they mean.",
        )
    from tierd.observe import metrics as declared  # noqa: PLC0415, importing declares every family
    from tierd.observe.families import reference_table  # noqa: PLC0415, only this command needs it

    assert declared.__all__
    print(reference_table(), end="")

"""`compute-node metrics --doc`: what the metrics of `compute-node serve` mean."""

from __future__ import annotations

from typing import Annotated

import typer

from tierd.errors import UsageError

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("metrics")(metrics)


def metrics(
    *,
    doc: Annotated[bool, typer.Option("--doc", help="Print the reference table, in Markdown.")] = False,
) -> None:
    """Explain the metrics that a serving node shows at /metrics."""
    if not doc:
        raise UsageError(
            "metrics: a node shows its metrics at http://HOST:PORT/metrics, see `compute-node serve --http`",
            hint="`compute-node metrics --doc` prints what they mean.",
        )
    from compute_node.server.metrics import reference_table  # noqa: PLC0415, only this command needs it

    print(reference_table(), end="")

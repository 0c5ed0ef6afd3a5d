"""`compute-node families`: the model families that the native engine runs, and how each compares with its reference."""

from __future__ import annotations

import json
import sys
from importlib import resources
from typing import Annotated, Any

import typer
from rich.table import Table

from tierd.terminal import show, wide_console

__all__ = ["known_families", "register"]


def known_families() -> list[dict[str, Any]]:
    """What the oracle tests measured, one object per family.

    `name`, `model_types` (of config.json), `formats` (in which experts can be stored), `oracle` (what computed the
    reference), `max_logit_error` (the largest over its oracle folders, of logits with a standard deviation of about
    1) and `greedy_match` (whether all tokens were the reference's).
    """
    content: list[dict[str, Any]] = json.loads(
        resources.files("compute_node.models").joinpath("families.json").read_text()
    )
    return content


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("families")(families)


def families(
    *, as_json: Annotated[bool, typer.Option("--json", help="A JSON list instead of a table.")] = False
) -> None:
    """Show which model families run natively, and how far each is from the reference implementation."""
    rows = known_families()
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("family", "model_type", "expert formats", "logit error", "greedy"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        match = "equal" if row["greedy_match"] else "differs"
        types, formats = "\n".join(row["model_types"]), ", ".join(row["formats"])
        table.add_row(row["name"], types, formats, f"{row['max_logit_error']:.1e}", match)
    console = wide_console()
    show(console, table)
    console.print("Largest difference of a logit from the model's own code in transformers, where logits are about 1.")

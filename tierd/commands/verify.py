"""`tierd verify STORE`: read every byte of a store and compare checksums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tierd.commands.progress import ByteProgress
from tierd.sizes import format_bytes
from tierd.store.verification import verify_store

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(verify)


def verify(
    store: Annotated[Path, typer.Argument(help="Directory of a converted store.", show_default=False)],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Read every record, tensor and file of a store; exit 0 if all are right, 1 if not."""
    with ByteProgress() as bar:
        report = verify_store(store, bar.update)
    if as_json:
        print(json.dumps(report.to_table(), indent=1))
    else:
        for problem in report.problems:
            print(f"! {problem}")
        print(
            f"{'ok' if report.ok else f'{len(report.problems)} problems'}: {report.records} experts, "
            f"{report.tensors} dense tensors, {format_bytes(report.bytes_read)} read from {report.store}"
        )
    if not report.ok:
        raise typer.Exit(1)

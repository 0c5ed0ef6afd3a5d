"""`compute-node check-oracle`: is this model, through tierd, the one that transformers computes?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compute_node.commands import options

__all__ = ["check_oracle", "register"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("check-oracle")(check_oracle)


def check_oracle(
    folder: Annotated[Path, typer.Argument(help="Folder with config.json, weights and ref.npz (make_oracles.py).")],
    threads: options.Threads = None,
    in_process: options.InProcessFlag = None,
    arena: options.Arena = "25%",
    *,
    float64: Annotated[
        bool | None,
        typer.Option(help="Run transformers in float64, too; by default where something differs and it is installed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Convert a tiny checkpoint, run it with few experts in RAM, and compare with the reference beside it.

    Exit code 0 if logits are within 1e-4 of scale and every greedy token and route is exact, or if rounding explains
    what differs (a near-tie, which is named); else 1.
    """
    settings = options.load_settings(None, threads=threads, in_process=in_process, arena=arena)
    # The kernels take seconds to import, which --help need not wait for.
    from compute_node.commands.comparing import compare_folder  # noqa: PLC0415

    compare_folder(folder, settings, float64=float64, as_json=as_json)

"""`tierd bench transformers`: decode speed of a model of transformers with its experts in tierd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tierd.commands.integrations import integration
from tierd.errors import UsageError
from tierd.sizes import format_bytes, format_share

__all__ = ["transformers"]


def transformers(
    *,
    folder: Annotated[
        Path, typer.Option("--dir", help="Where checkpoint, store and offloaded weights are made, and kept.")
    ],
    layers: Annotated[int, typer.Option(min=1, max=16, help="Layers of the model: 1.6 GB on disk for each.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each side.")] = 7,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a turn.")] = 8,
    arena: Annotated[int, typer.Option(min=1, max=100, help="Percent of the experts in RAM, beside offload.")] = 25,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="resident, offload, offload-by-hand or load; repeat it. Default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Compare with the unmodified model in RAM, and with accelerate's disk offload at the same memory for weights.

    Layers have OLMoE-1B-7B's sizes and random weights in bf16; routes are given, and alike on all sides.
    """
    bench = integration("bench")
    parts = tuple(only or bench.PARTS)
    unknown = [part for part in parts if part not in bench.PARTS]
    if unknown:
        raise UsageError(f"--only {unknown[0]!r} is not known", hint=f"Known: {', '.join(bench.PARTS)}.")
    console = Console(stderr=True, highlight=False)
    effort = bench.Effort(
        layers=layers, turns=turns, tokens=tokens, arena=arena / 100, threads=threads, say=console.print
    )
    found = bench.measure(folder, effort, parts)
    if as_json:
        print(json.dumps(found))
        return
    for part in parts:
        details = found["details"][part]
        if part == "load":
            print(
                f"load      at most {format_bytes(details['peak_bytes'])} beside what imports take, with "
                f"{format_bytes(details['dense_bytes'])} of dense weights and {format_bytes(details['expert_bytes'])} "
                "of experts"
            )
            continue
        other = "unmodified" if part == "resident" else "offload"
        print(
            f"{part:<9} {details['ratio']:.2f}  tierd {details['tierd']['tokens_per_second']:.2f} tok/s, "
            f"{other} {details[other]['tokens_per_second']:.2f} tok/s, {format_share(details['share_of_hits'])} in RAM"
        )
    if found["void"]:
        print(
            f"VOID: others had {format_share(found['foreign_cpu_share'])} of the processors; measure on a quiet machine"
        )

"""`compute-node bench llama-cpp`: this node beside llama.cpp on the same geometry."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from compute_node.bench.geometries import geometry_named
from compute_node.commands import options
from compute_node.commands.bench_output import print_json, progress_lines

__all__ = ["llama_cpp", "register"]


def register(group: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    group.command("llama-cpp")(llama_cpp)


def llama_cpp(
    geometry: Annotated[str, typer.Option("--geometry", help="olmoe-1b-7b or qwen3-30b-a3b.")] = "olmoe-1b-7b",
    layers: Annotated[int | None, typer.Option("--layers", help="Layers of it. Default: all.")] = None,
    threads: options.Threads = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of each side.")] = 5,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens decoded in a turn.")] = 32,
    prompt: Annotated[int, typer.Option("--prompt", min=2, help="Tokens of the prompt.")] = 512,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Prompt tokens computed at once on this side.")] = 256,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with both raw sides.")] = False,
) -> None:
    """Decode and prefill beside llama.cpp; needs the packages xllamacpp and gguf, and 4 GB of temporary space.

    Both sides have the same weights.
    """
    # The kernels take seconds to import, which --help need not wait for.
    from compute_node.bench.llama_cpp import measure_llama_cpp  # noqa: PLC0415

    config = geometry_named(geometry).cut(layers)
    found = measure_llama_cpp(
        config,
        threads=threads,
        rounds=rounds,
        tokens=tokens,
        prompt=prompt,
        rows=rows,
        tell=progress_lines(),
    ) | {"geometry": geometry, "layers": config["num_hidden_layers"]}
    if as_json:
        print_json(found)
        return
    table = Table("tokens/s", "tierd", "llama.cpp", "ratio")
    for figure in ("decode", "prefill"):
        ours, theirs = (np.median([turn[figure] for turn in found[side]]) for side in ("ours", "llama_cpp"))
        table.add_row(figure, f"{ours:.1f}", f"{theirs:.1f}", f"{found[f'{figure}_ratio']:.2f}")
    console = Console(highlight=False)
    console.print(table)
    apart = found["largest_logprob_difference"]
    console.print(f"Both have the same weights; what they say of the next token is {apart:.2f} apart at most (nats).")
    if found["void"]:
        console.print("Void: the machine was not free enough. Repeat it on a quiet one.")

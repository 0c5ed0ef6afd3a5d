"""`compute-node bench trace`: decode a recorded run again, and time it; `tierd tune` compares settings by it."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from compute_node.bench.recorded_walk import RecordedWalk
from compute_node.commands import options
from compute_node.commands.opening import open_store
from tierd.policy.trace import load_trace

__all__ = ["register", "trace"]


def register(group: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    group.command("trace")(trace)


def trace(
    store: options.Store,
    recorded: Annotated[Path, typer.Argument(help="A run recorded with --trace.", show_default=False)],
    *,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Most tokens decoded in one run.")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Runs that count; one more goes before.")] = 5,
    numerics: options.Numerics = None,
    threads: options.Threads = None,
    context: options.Context = None,
    in_process: options.InProcessFlag = None,
    arena: options.Arena = None,
    messages: options.Messages = None,
    prefetch: options.Prefetch = None,
    profile: options.Profile = None,
    config: options.Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Decode the tokens of a recorded run again: the same work for every setting, whatever it would have generated."""
    settings = options.load_settings(
        config,
        numerics=numerics,
        threads=threads,
        context=context,
        in_process=in_process,
        arena=arena,
        messages=messages,
        prefetch=prefetch,
        profile=profile,
    )
    found = load_trace(recorded)
    console = Console(stderr=True, highlight=False)
    with open_store(store, settings, name="bench", console=console) as opened:
        report = RecordedWalk(opened.model, found, tokens).measure(rounds)
    if as_json:
        sys.stdout.write(json.dumps(report) + "\n")
        return
    out = Console(highlight=False)
    seconds = statistics.median(report["seconds_per_token"])
    out.print(f"{1 / seconds:.3g} tokens/s, median of {rounds} runs of {report['tokens']} tokens", markup=False)
    out.print(
        f"{report['wait_seconds'] / seconds:.0%} of it waited for experts; {report['hit_rate']:.0%} were in RAM",
        markup=False,
    )

"""`compute-node bench trace`: decode a recorded run again, and time it; `tierd tune` compares settings by it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from compute_node.commands import options
from compute_node.commands.bench_output import print_json
from compute_node.settings import NodeSettings
from tierd.client.own_daemon import early_daemon
from tierd.client.private_daemon import PrivateDaemon
from tierd.option_tables import Given, with_options
from tierd.sizes import format_share

__all__ = ["register", "trace"]


_OPTIONS = options.RUN | {name: options.MODEL[name] for name in ("messages", "prefetch", "profile")}


def register(group: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    group.command("trace")(trace)


@with_options(given=_OPTIONS)
def trace(
    store: options.Store,
    recorded: Annotated[Path, typer.Argument(help="A run recorded with --trace.", show_default=False)],
    *,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Most tokens decoded in one run.")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Runs that count; one more goes before.")] = 5,
    given: Given,
    config: options.Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Decode the tokens of a recorded run again: the same work for every setting, whatever it would have generated."""
    settings = options.load_settings(config, given)
    with early_daemon(store, in_process=settings.in_process, arena=settings.arena) as daemon:
        report = _measure(store, settings, recorded, daemon, tokens=tokens, rounds=rounds)
    if as_json:
        print_json(report)
        return
    out = Console(highlight=False)
    seconds = statistics.median(report["seconds_per_token"])
    out.print(f"{1 / seconds:.3g} tokens/s, median of {rounds} runs of {report['tokens']} tokens", markup=False)
    out.print(
        f"{format_share(report['wait_seconds'] / seconds)} of it waited for experts; "
        f"{format_share(report['hit_rate'])} were in RAM",
        markup=False,
    )


def _measure(
    store: str, settings: NodeSettings, recorded: Path, daemon: PrivateDaemon | None, *, tokens: int, rounds: int
) -> dict[str, Any]:
    # The kernels take seconds to import, which --help need not wait for.
    from compute_node.bench.recorded_walk import RecordedWalk  # noqa: PLC0415
    from compute_node.commands.opening import open_store  # noqa: PLC0415
    from tierd.policy.trace import load_trace  # noqa: PLC0415

    found = load_trace(recorded)
    console = Console(stderr=True, highlight=False)
    with open_store(store, settings, name="bench", daemon=daemon, console=console) as opened:
        return RecordedWalk(opened.model, found, tokens).measure(rounds)

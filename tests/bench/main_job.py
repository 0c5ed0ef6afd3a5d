"""Measures the main job on the embedded model: tokens per second at several arena sizes, in alternating runs.

    python tests/bench/main_job.py [--rounds 5] [--tokens 128] [--out FILE]

Each round runs every arena size once, so that a drift of the machine touches all alike. The table shows medians and
spread; the JSON holds every run. Tokens are compared across all runs: one difference ends the bench with exit code 1.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tierd.client.private_daemon import PrivateDaemon
from tierd.demonstration import DemoAnswer, DemoRequest, ask, embedded_store

ARENAS = ("10%", "25%", "50%", "100%")


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    tokens: Annotated[int, typer.Option(min=2, max=1024)] = 128,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Run the rounds and print the table."""
    console = Console(stderr=True)
    store = embedded_store(console.print)
    request = DemoRequest("It was a fine morning, and", tokens, 0.7, 40, 0)
    runs: dict[str, list[dict[str, Any]]] = {arena: [] for arena in ARENAS}
    expected: list[int] | None = None
    measure(store.path, "100%", request)  # compiles, and warms what can be warmed
    for _ in track(range(rounds), description="rounds", console=console):
        for arena in ARENAS:
            answer, others = measure(store.path, arena, request)
            expected = expected or answer.token_ids
            if answer.token_ids != expected:
                sys.exit(f"the tokens at arena {arena} differ from those of the first run")
            runs[arena].append(figures(answer) | {"other_cpu_share": others})
    report = {
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
        },
        "tokens": tokens,
        "experts_bytes": store.geometry.experts_total * store.geometry.slot_bytes,
        "runs": runs,
        "identical": True,
    }
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(runs)


def measure(store: Path, arena: str, request: DemoRequest) -> tuple[DemoAnswer, float]:
    """One daemon, one node, one answer; and the share of the processors that others used in that time."""
    before, own = psutil.cpu_times(), psutil.Process().cpu_times()
    daemon = PrivateDaemon(store, "--arena", arena, "--http", "off", "--log-level", "warning", "--history", "off")
    try:
        answer = ask(daemon, request, began=lambda: None, wrote=lambda _text: None)
    finally:
        daemon.stop()
    after, now = psutil.cpu_times(), psutil.Process().cpu_times()
    total = sum(after) - sum(before)
    idle = after.idle - before.idle + after.iowait - before.iowait
    ours = sum(now[:4]) - sum(own[:4])  # user and system, our own and our finished children's
    return answer, max(0.0, 1 - (idle + ours) / total) if total else 0.0


def figures(answer: DemoAnswer) -> dict[str, Any]:
    """What a run is judged by."""
    node, asked = answer.node, answer.daemon["requests"]
    return {
        "tokens_per_second": node["tokens_per_second"],
        "time_to_first_token_seconds": node["time_to_first_token_seconds"],
        "wait_seconds": node["wait_seconds"],
        "compute_seconds": node["compute_seconds"],
        "hit_rate": asked["hits"] / asked["requests"],
        "bytes_read": answer.bytes_read,
    }


def show(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Medians, and the spread of the speed."""
    table = Table(title="embedded model, medians of alternating runs")
    for column in ("arena", "tok/s", "min to max", "first token", "in RAM", "MB read", "waited s", "computed s"):
        table.add_column(column, justify="right")
    for arena, results in runs.items():

        def middle(name: str, results: list[dict[str, Any]] = results) -> float:
            return statistics.median(result[name] for result in results)

        speeds = [result["tokens_per_second"] for result in results]
        table.add_row(
            arena,
            f"{middle('tokens_per_second'):.0f}",
            f"{min(speeds):.0f} to {max(speeds):.0f}",
            f"{1000 * middle('time_to_first_token_seconds'):.0f} ms",
            f"{middle('hit_rate'):.1%}",
            f"{middle('bytes_read') / 1e6:.1f}",
            f"{middle('wait_seconds'):.2f}",
            f"{middle('compute_seconds'):.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

"""`compute-node bench`: measurements of this machine. Each has a file of its own and a `--json`."""

from __future__ import annotations

import typer

from compute_node.commands import (
    bench_arena,
    bench_decode,
    bench_far,
    bench_llama_cpp,
    bench_near,
    bench_prefetch,
    bench_serve,
    bench_speed,
    bench_trace,
)

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the group."""
    group = typer.Typer(name="bench", no_args_is_help=True, help="Measure this machine.")
    for command in (
        bench_arena, bench_decode, bench_far, bench_llama_cpp, bench_near, bench_prefetch, bench_serve,
        bench_speed, bench_trace,
    ):  # fmt: skip
        command.register(group)
    group.callback()(_group)
    app.add_typer(group)


def _group() -> None:
    """Measure this machine; figures of a busy machine are void, and say so."""

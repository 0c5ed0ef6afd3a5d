"""`compute-node bench serve`: many clients at once on one engine, beside the bare steps of the same model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from compute_node import embedded
from compute_node.bench.forced_routes import drawn_apart
from compute_node.bench.geometries import geometry_named
from compute_node.bench.http_speed import measure_http
from compute_node.bench.random_model import RandomModel
from compute_node.bench.serve_speed import CLIENTS, measure_serving
from compute_node.bench.step_speed import resident
from compute_node.commands import options
from compute_node.commands.bench_output import print_json, progress_lines, say_void
from compute_node.engine.model import Model, ModelOptions
from tierd.checkpoint.convert import convert
from tierd.client.in_process import InProcess
from tierd.errors import UsageError
from tierd.store.store import ExpertStore

__all__ = ["register", "serve"]

_PROMPT_ROWS = 32
_LONGEST_PROMPT = 24


def register(group: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    group.command("serve")(serve)


def serve(
    geometry: Annotated[str, typer.Option("--geometry", help="Sizes of the model with random weights.")] = (
        "olmoe-1b-7b"
    ),
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layers of it.")] = 4,
    clients: Annotated[
        list[int] | None, typer.Option("--clients", min=1, help="Clients at once; repeat it. Default: 1, 4, 16, 64.")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="For each number of clients.")] = 8.0,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of an answer.")] = 96,
    numerics: options.Numerics = None,
    threads: options.Threads = None,
    *,
    embedded_too: Annotated[
        bool, typer.Option("--embedded/--no-embedded", help="Serve the embedded model, too.")
    ] = True,
    over_http: Annotated[
        bool, typer.Option("--http", help="Serve the embedded model over HTTP, too, by a server of its own.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with all figures.")] = False,
) -> None:
    """Serve 1, 4, 16 and 64 clients at once, all experts in RAM; some of them leave in the middle of an answer.

    Routes of the real geometry are given: those of each token are drawn apart, so that requests share no more experts
    than chance has them share.
    """
    counts = sorted(set(clients or CLIENTS))
    if counts[-1] > 1024:
        raise UsageError(f"--clients {counts[-1]} is more than 1024")
    if over_http and not embedded_too:
        raise UsageError("--http serves the embedded model", hint="Leave --no-embedded out.")
    tell = progress_lines()
    how = ModelOptions(
        numerics=numerics or "fast",
        context=_LONGEST_PROMPT + tokens + 1,
        sequences=counts[-1],
        rows=counts[-1] + _PROMPT_ROWS,
        head_rows=counts[-1],
        threads=threads,
    )
    sizes = geometry_named(geometry).cut(layers)
    found = _random(sizes, how, counts, seconds, tokens, tell) | {"geometry": geometry, "layers": layers}
    if embedded_too:
        found["embedded"] = _embedded(how, counts, seconds, tokens, tell, over_http=over_http)
    if as_json:
        print_json(found)
        return
    console = Console(highlight=False)
    _show(console, f"{geometry}, {layers} layers", counts, found)
    if embedded_too:
        _show(console, "embedded model", counts, found["embedded"])
    if over_http:
        _show(console, "embedded model over HTTP", counts, found["embedded"]["http"])


def _random(
    config: dict[str, Any], how: ModelOptions, counts: list[int], seconds: float, tokens: int, tell: Any
) -> dict[str, Any]:
    random = RandomModel(config)
    source = resident(random, tell)
    with Model(source, how, adapt=drawn_apart(random.geometry)) as model:
        return measure_serving(model, clients=counts, seconds=seconds, tokens=tokens, tell=tell)[0]


def _embedded(
    how: ModelOptions, counts: list[int], seconds: float, tokens: int, tell: Any, *, over_http: bool
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tierd-bench-") as name:
        folder = Path(name)
        convert(embedded.path(), folder / "store", experts="int4-g64", dense="int8")
        with Model(InProcess(ExpertStore.open(folder / "store")), how) as model:
            found, expected = measure_serving(model, clients=counts, seconds=seconds, tokens=tokens, tell=tell)
        if over_http:
            found["http"] = measure_http(
                folder / "store", expected, how=how, clients=counts, seconds=seconds, folder=folder, tell=tell
            )
            rates = found["tokens_per_second"]
            found["http"]["share_of_engine"] = {
                count: rate / rates[count] if rates[count] else 0.0
                for count, rate in found["http"]["tokens_per_second"].items()
            }
    return found


def _show(console: Console, title: str, counts: list[int], found: dict[str, Any]) -> None:
    table = Table("clients", "tokens/s", "first token p50 / p99, ms", "per token p50 / p99, ms", title=title)
    over_http = "share_of_engine" in found
    table.add_column("of the engine" if over_http else "rows a step")
    for count in map(str, counts):
        first, last, each, slow = (
            1e3 * found[name][count] for name in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
        )
        table.add_row(
            count,
            f"{found['tokens_per_second'][count]:.1f}",
            f"{first:.0f} / {last:.0f}",
            f"{each:.1f} / {slow:.1f}",
            f"{found['share_of_engine'][count]:.2f}" if over_http else f"{found['rows_per_step'][count]:.1f}",
        )
    console.print(table)
    console.print(f"errors {found['errors']}, answers mixed up or changed {found['crossed_answers']}")
    if "aggregate_ratio_16_to_1" in found:
        console.print(
            f"16 clients / 1: {found['aggregate_ratio_16_to_1']:.2f}; of the bare step: "
            f"{found['one_client_share_of_step']:.2f} for one, {found['sixteen_share_of_step']:.2f} for sixteen"
        )
    say_void(console, found)

"""`compute-node bench prefetch`: are misses foreseen, does reading ahead pay, and can it cost anything?"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from compute_node import embedded
from compute_node.bench.dense_view import DenseView
from compute_node.bench.drawn_hints import MEASURED
from compute_node.bench.geometries import geometry_named
from compute_node.bench.prefetch_chart import draw_recall
from compute_node.bench.prefetch_embedded import measure_embedded
from compute_node.bench.prefetch_recall import Recall, measure_recall
from compute_node.bench.prefetch_speed import CASES, check_cases, in_memory, measure_speed, spare_core
from compute_node.bench.random_model import RandomModel
from compute_node.bench.random_store import random_store
from compute_node.commands import options
from compute_node.commands.bench_output import print_json, progress_lines, say_void
from compute_node.engine.model import Model, ModelOptions
from tierd.checkpoint.convert import convert
from tierd.client.in_process import InProcess
from tierd.errors import UsageError
from tierd.sizes import format_share
from tierd.store.store import ExpertStore

__all__ = ["prefetch", "register"]

_TRACES = Path(__file__).parents[2] / "tests" / "bench" / "traces"


def register(group: typer.Typer) -> None:
    """Adds the command to the group `bench`."""
    group.command("prefetch")(prefetch)


def prefetch(
    train: Annotated[Path, typer.Option(help="Trace whose tokens predictors learn from.")] = _TRACES / "train.npz",
    held: Annotated[Path, typer.Option(help="Trace whose tokens they are judged on.")] = _TRACES / "held.npz",
    train_texts: Annotated[int, typer.Option(min=0, help="Texts of the first.")] = 16,
    held_texts: Annotated[int, typer.Option(min=1, help="Texts of the second.")] = 8,
    geometry: Annotated[str, typer.Option("--geometry", help="Of which model speeds are measured.")] = "olmoe-1b-7b",
    layers: Annotated[int, typer.Option("--layers", min=2, help="Layers of it.")] = 8,
    experts: Annotated[int | None, typer.Option("--experts", help="Routed experts of a layer. Default: all.")] = None,
    arena: Annotated[str, typer.Option("--arena", help="RAM for experts.")] = "50%",
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens of a run.")] = 32,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Runs of each side, alternating.")] = 5,
    cases: Annotated[str, typer.Option("--cases", help="Which are timed, by name, with commas.")] = ",".join(CASES),
    *,
    memory: Annotated[
        bool, typer.Option("--memory/--drive", help="Copy the store into memory, where the drive is too slow.")
    ] = False,
    threads: options.Threads = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Chart of recall against waste by predictor, as PNG.")
    ] = None,
    recall: Annotated[
        bool, typer.Option("--recall/--no-recall", help="Compare predictors; or draw hints by figures measured before.")
    ] = True,
    speeds: Annotated[
        bool, typer.Option("--speeds/--no-speeds", help="Time prefetch on a real geometry; or predictors only.")
    ] = True,
    embedded_model: Annotated[
        bool, typer.Option("--embedded/--no-embedded", help="Time a node's own hints on the embedded model, too.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Compare predictors on the embedded model's routing, then time prefetch on a real geometry with random weights.

    The drive of the second part is throttled, so that reading a token's misses takes 0.5, 1 and 2 times its compute;
    the worst of these, wrong hints, a saturated drive and a resident model is `worst_case_ratio`. Last, what a node's
    own hints gain or cost on the embedded model, with a drive as it is.
    """
    progress = progress_lines()
    chosen = [name.strip() for name in cases.split(",") if name.strip()] if speeds else []
    check_cases(chosen)
    texts = _texts(held, held_texts)
    report: dict[str, Any] = {}
    foreseen = MEASURED
    if recall:
        found = _recall(_texts(train, train_texts), texts, progress)
        report |= found.report | {"foreseen": asdict(found.foreseen)}
        foreseen = found.foreseen
        if plot is not None:
            draw_recall(plot, found.report)
    if chosen:
        sizes = geometry_named(geometry)
        progress(f"store with the sizes of {sizes.name}; it is made at the first run")
        made = random_store(sizes, layers=layers, experts=experts)
        with in_memory(made) if memory else nullcontext(made) as store:
            view = DenseView(store, RandomModel(sizes.cut(layers, experts)))
            report |= measure_speed(
                view, store.path, foreseen, arena=arena, tokens=tokens, rounds=rounds,
                threads=threads or spare_core(), cases=chosen, tell=progress,
            )  # fmt: skip
        report |= {"geometry": sizes.name, "layers": layers}
    if embedded_model:
        progress("a node's own hints on the embedded model")
        report |= {"embedded": measure_embedded(texts, rounds=rounds, threads=threads)}
    if as_json:
        print_json(report)
    else:
        _show(report)


def _texts(path: Path, count: int) -> list[NDArray[np.int64]]:
    """`count` texts of a trace, spread over the whole of it."""
    try:
        with np.load(path, allow_pickle=False) as content:
            tokens, window = content["tokens"].astype(np.int64), int(content["window"])
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{path} is no trace: {error}", hint="The repository has two in tests/bench/traces; see --train and --held."
        ) from error
    whole = len(tokens) // window
    if count > whole:
        raise UsageError(f"{path} has {whole} texts, not {count}")
    return [tokens[n * window : (n + 1) * window] for n in np.linspace(0, whole - 1, count).astype(int).tolist()]


def _recall(train: list[NDArray[np.int64]], held: list[NDArray[np.int64]], progress: Any) -> Recall:
    with tempfile.TemporaryDirectory(prefix="tierd-bench-") as folder:
        store = Path(folder) / "store"
        convert(embedded.path(), store, experts="bf16", dense="bf16")
        context = max(map(len, [*train, *held]))
        with Model(InProcess(ExpertStore.open(store)), ModelOptions(context=context)) as model:
            return measure_recall(model, train, held, residency=0.25, tell=progress)


def _show(report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    lines = []
    if "recall_on_misses" in report:
        wasted, plain_wasted = report["wasted_per_useful_byte"], report["baseline_wasted_per_useful_byte"]
        lines += [
            f"recall on misses    {report['recall_on_misses']:.3f} at {wasted:.2f} wasted bytes per useful one",
            f"plain next router   {report['baseline_recall_on_misses']:.3f} at {plain_wasted:.2f}",
            f"closed by ours      {format_share(report['closed_share'])} of the distance to 1",
        ]
    for ratio, speedup in report.get("speedup", {}).items():
        hidden = report["hidden_share"][ratio]
        lines.append(f"reads {ratio}x compute  speed {speedup:.2f}, {format_share(hidden)} of the hideable wait hidden")
    if report.get("worst_case_ratio") is not None:
        lines.append(f"worst case          {report['worst_case_ratio']:.3f}")
    if "embedded" in report:
        lines.append(f"embedded model      speed {report['embedded']['speedup']:.2f} by a node's own hints")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if report.get("too_slow"):
        console.print(
            f"this machine cannot read as fast as wanted for: {', '.join(report['too_slow'])}", style="yellow"
        )
    if "void" in report:
        say_void(console, report)

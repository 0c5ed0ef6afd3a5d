"""`tierd replay TRACE…`: which policy would have had the experts of a recorded run in RAM?"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tierd.commands.replay_chart import draw_chart
from tierd.errors import UsageError
from tierd.policy.belady import Belady
from tierd.policy.contest import COLD, Score, best_half_life, compete, gap_closed
from tierd.policy.decayed_frequency import DecayedFrequency
from tierd.policy.lru import Lru
from tierd.policy.policies import DEFAULT_POLICY, POLICIES
from tierd.policy.trace import Trace, join_traces, load_trace
from tierd.sizes import format_bytes, format_count, format_share, parse_bytes
from tierd.terminal import show, wide_console

__all__ = ["register"]

_ALL = "all"
_ASSUMED_BYTES = 1 << 20
_QUIET_SECONDS = 5.0
_PROMPT_ROWS = 64


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(replay)


def replay(
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="TRACE...", help="Written by compute-node generate --trace.", show_default=False),
    ],
    *,
    arena: Annotated[str, typer.Option(help="Arena sizes, in percent of all experts.")] = "10%,25%,50%",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="More policies to compare, by commas or repeated, or all. LRU, Belady, the default and the decayed "
            "frequency that fits best always run."
        ),
    ] = None,
    train: Annotated[
        Path | None, typer.Option(help="An earlier trace: half-lives are fitted and token tables counted on it.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Replay only so many tokens.")] = None,
    prompt: Annotated[
        int, typer.Option(min=0, help=f"Treat so many tokens of each text as its prompt, {_PROMPT_ROWS} to a step.")
    ] = 0,
    expert_bytes: Annotated[
        str | None, typer.Option(help="Size of an expert, where the trace does not say it.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one per processor.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw hit rate against arena size into this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Run eviction policies over a recorded trace, with Belady's rule as the bound."""
    percents = _percents(arena)
    size = None if expert_bytes is None else parse_bytes(expert_bytes, option="--expert-bytes")
    trace = join_traces([load_trace(path) for path in traces])
    history = None if train is None else load_trace(train)
    if history is not None and history.layer_experts != trace.layer_experts:
        raise UsageError(f"--train {train}: it is of another model: its layers or their experts differ")
    if tokens is not None:
        trace = trace.head(tokens)
    if prompt:
        trace = trace.with_prompts(prompt, _PROMPT_ROWS)
    if not len(trace):
        raise UsageError(f"{trace.name}: no step to replay")
    notes = Console(stderr=True, highlight=False)
    began = time.monotonic()

    def tell(done: str) -> None:
        if notes.is_terminal or time.monotonic() - began > _QUIET_SECONDS:
            notes.print(f"  {done} · {time.monotonic() - began:.0f} s", style="dim", markup=False)

    best = best_half_life(trace if history is None else history, percents, jobs=jobs, tell=tell)
    names = _policies(policy, best, cold=history is not None)
    scores = compete(trace, names, percents, history=history, jobs=jobs, tell=tell)
    answer = _answer(trace, scores, best, size, fitted_on=trace.name if train is None else str(train))
    if plot is not None:
        draw_chart(plot, scores, title=trace.name)
    if as_json:
        print(json.dumps(answer, ensure_ascii=False))
    else:
        _show(answer, scores)


def _percents(text: str) -> list[float]:
    percents = []
    for part in text.split(","):
        try:
            percent = float(part.strip().removesuffix("%")) if part.strip().endswith("%") else math.nan
        except ValueError:
            percent = math.nan
        if not 0 < percent <= 100:
            raise UsageError(
                f"--arena: {part.strip()!r} is no percentage above 0%, up to 100%", hint="As in 10%,25%,50%."
            )
        percents.append(percent)
    if len(set(percents)) != len(percents):
        raise UsageError(f"--arena: {text} names a size twice")
    return percents


def _policies(given: list[str] | None, best: str, *, cold: bool) -> list[str]:
    """The bounds first, then what was asked for, each once."""
    chosen = [name.strip() for text in given or () for name in text.split(",")]
    if _ALL in chosen:
        # The fitted decayed frequency runs in the place of the other one.
        chosen = [name for name in chosen if name != _ALL] + sorted(POLICIES.keys() - {DecayedFrequency.name})
    if cold:
        chosen.append(COLD)
    return list(dict.fromkeys([Lru.name, Belady.name, best, DEFAULT_POLICY, *chosen]))


def _answer(trace: Trace, scores: list[Score], best: str, size: int | None, *, fitted_on: str) -> dict[str, Any]:
    expert_bytes = size or trace.expert_bytes or _ASSUMED_BYTES
    rates = {(score.policy, score.percent): score.total.hit_rate for score in scores}
    policies: dict[str, dict[str, dict[str, float | int | None]]] = {}
    for score in scores:
        figures = {
            "hit_rate": score.total.hit_rate,
            "prefill_hit_rate": score.prefill.hit_rate if score.prefill.requests else None,
            "decode_hit_rate": score.decode.hit_rate if score.decode.requests else None,
            "bytes_read": score.total.misses * expert_bytes,
            "gap_closed": gap_closed(
                score.total.hit_rate, rates[Lru.name, score.percent], rates[Belady.name, score.percent]
            ),
        }
        for figure, value in figures.items():
            policies.setdefault(score.policy, {}).setdefault(figure, {})[f"{score.percent:g}"] = value
    return {
        "trace": trace.name,
        "tokens": len(trace),
        "prefill_tokens": int(trace.prefill.sum()),
        "experts": trace.experts_total,
        "expert_bytes": expert_bytes,
        "expert_bytes_assumed": not (size or trace.expert_bytes),
        "slots": {f"{score.percent:g}": score.slots for score in scores},
        "default": DEFAULT_POLICY,
        "best_decayed_frequency": best,
        "fitted_on": fitted_on,
        "policies": policies,
    }


def _show(answer: dict[str, Any], scores: list[Score]) -> None:
    console = wide_console()
    both = any(s.prefill.requests for s in scores) and any(s.decode.requests for s in scores)
    phases = {"prefill": "prefill_hit_rate", "decode": "decode_hit_rate"} if both else {}
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column("policy", no_wrap=True)
    for title in ("hit rate", "of the gap", *phases, "read"):
        table.add_column(title, justify="right", no_wrap=True)
    for percent, slots in answer["slots"].items():
        table.add_row(f"{percent} %, {format_count(slots, 'slot')}", style="bold")
        for name, figures in answer["policies"].items():
            closed = figures["gap_closed"][percent]
            rates = [figures[rate][percent] for rate in ("hit_rate", *phases.values())]
            hit_rate, *others = (format_share(rate, digits=1) for rate in rates)
            read = format_bytes(figures["bytes_read"][percent])
            table.add_row(f"  {name}", hit_rate, "" if closed is None else f"{closed:.2f}", *others, read)
    console.print(f"{answer['trace']}: {answer['tokens']:,} tokens, {answer['prefill_tokens']:,} of them prompt")
    console.print("of the gap: the share of the distance from LRU to Belady's bound")
    show(console, table)
    assumed = ", which is assumed: see --expert-bytes" if answer["expert_bytes_assumed"] else ""
    console.print(f"an expert has {format_bytes(answer['expert_bytes'])}{assumed}", style="dim")
    fitted = f"{answer['best_decayed_frequency']} was fitted on {answer['fitted_on']}"
    console.print(f"the default is {answer['default']}; {fitted}", style="dim", soft_wrap=True)

"""`tierd tune STORE`: find the settings that are fastest on this machine, and what limits it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from tierd.demonstration import node_command
from tierd.errors import TierdError, UsageError
from tierd.profiles import NodeTuned, Profile, ServeTuned, machine_key, profile_path, save_profile
from tierd.state import state_directory
from tierd.store.checksums import sha256
from tierd.store.store import ExpertStore
from tierd.tuning.journal import Journal
from tierd.tuning.limit import ADVICE, limit_of
from tierd.tuning.sweep import Choice, Outcome, Result, Settings, sweep
from tierd.tuning.trial import Workload, describe, run_trial

__all__ = ["choices_of", "register"]

_PROMPT: Final = "It was a fine morning, and the people of the town went about their work as they did every day."
_RECORD_SECONDS: Final = 3600.0
_SMALLER: Final = (0.9, 0.75)
"""Parts of the arena that are tried in its place: what it leaves is cache and memory for others."""


class _OutOfTimeError(Exception):
    """The bound on a call was reached between two trials."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(tune)


def tune(
    store: Annotated[Path, typer.Argument(help="Directory of a converted store.", show_default=False)],
    *,
    trace: Annotated[
        Path | None, typer.Option(help="A recorded run to decode again. Default: one is recorded, once.")
    ] = None,
    arena: Annotated[str | None, typer.Option(help="RAM for experts, as for tierd serve.")] = None,
    ram: Annotated[str | None, typer.Option(help="RAM of the whole daemon, as for tierd serve.")] = None,
    tokens: Annotated[int, typer.Option(min=2, max=4096, help="Tokens decoded in one run.")] = 32,
    rounds: Annotated[int, typer.Option(min=2, max=99, help="Runs of a trial.")] = 5,
    minutes: Annotated[
        float, typer.Option(min=0.01, max=1440, help="Begin no trial after that; call again to go on.")
    ] = 30.0,
    numerics: Annotated[str, typer.Option(help="exact or fast.")] = "exact",
    again: Annotated[bool, typer.Option("--again", help="Forget the trials of an earlier call.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Try threads, drive reads, prefetch and arena sizes on a recorded run; keep what is faster by more than the noise.

    Every trial decodes the same tokens in a daemon and a node of its own; all must compute the same logits. The result
    is a profile for this store on this machine. `tierd serve` and `compute-node` use it for what is given neither as an
    option nor in the environment nor in a file; `--profile off` leaves it out.
    """
    opened = ExpertStore.open(store)
    console = Console(stderr=True, highlight=False)
    folder = state_directory() / "tune"
    recorded = trace if trace is not None else _recorded(store, opened.fingerprint, folder, tokens, console)
    work = Workload(store, recorded, tokens, rounds, numerics)
    start = {f"serve.{name}": value for name, value in (("arena", arena), ("ram", ram)) if value is not None}
    journal = Journal(
        folder / f"{machine_key()}-{opened.fingerprint[:16]}.json",
        {
            "fingerprint": opened.fingerprint, "machine": machine_key(), "trace": sha256(recorded.read_bytes()),
            "start": start, "tokens": tokens, "rounds": rounds, "numerics": numerics,
        },
    )  # fmt: skip
    if again:
        journal.forget()
    measure = _measure(work, journal, time.monotonic() + 60 * minutes, console)
    experts = opened.geometry.experts_total
    try:
        result = sweep(start, lambda first: choices_of(first, experts), measure)
    except _OutOfTimeError:
        if as_json:
            print(json.dumps({"finished": False, "trials": len(journal)}))
        else:
            console.print(f"{len(journal)} trials are made, {minutes:g} minutes are over: call it again to go on.")
        return
    profile = _profile(opened.fingerprint, result)
    save_profile(profile)
    trials = len(journal)
    journal.forget()
    if as_json:
        path = str(profile_path(opened.fingerprint))
        print(
            json.dumps({"finished": True, "trials": trials, "steps": result.steps, "path": path} | profile.model_dump())
        )
    else:
        _show(result, profile)


def choices_of(first: Outcome, experts: int) -> Sequence[Choice]:
    """What this machine leaves open.

    Args:
        first: a trial of the settings that hold; its facts say what the daemon and the node chose by themselves.
        experts: of the store.
    """
    threads, reads = int(first.facts["threads"]), int(first.facts["drive_threads"])
    share = 100 * int(first.facts["slots"]) / experts
    found = [
        Choice("threads", tuple({"node.threads": n} for n in sorted({threads - 1, threads // 2} - {0, threads}))),
        Choice(
            "drive reads at a time",
            tuple({"serve.drive_threads": n} for n in sorted({reads // 2, 2 * reads} - {0, reads}) if n <= 64),
        ),
        Choice("direct or buffered", ({"serve.direct": False},) if first.facts["direct"] else ()),
        Choice(
            "prefetch",
            ({"node.prefetch": "auto"}, {"serve.guess": "auto"}, {"node.prefetch": "tokens", "serve.guess": "auto"}),
        ),
        Choice("arena", tuple({"serve.arena": f"{share * part:.4g}%"} for part in _SMALLER)),
    ]
    return [choice for choice in found if choice.candidates]


def _measure(work: Workload, journal: Journal, until: float, console: Console) -> Callable[[Settings], Outcome]:
    first: list[Outcome] = []
    made: list[Outcome] = []

    def measure(settings: Settings) -> Outcome:
        outcome = journal.recall(settings)
        if outcome is None:
            if time.monotonic() > until and made:
                raise _OutOfTimeError
            console.print(f"  trial {len(journal) + 1}: {describe(settings)}", style="dim", markup=False)
            outcome = run_trial(work, settings)
            journal.add(outcome)
            made.append(outcome)
        first.append(outcome)
        if outcome.digest != first[0].digest:
            raise TierdError(
                f"the logits under the settings ({describe(settings)}) differ from those under others",
                hint="This must never happen; please report it with the output of this command.",
            )
        return outcome

    return measure


def _recorded(store: Path, fingerprint: str, folder: Path, tokens: int, console: Console) -> Path:
    """A run of the model on a plain sentence, recorded once for as many tokens."""
    path = folder / f"{fingerprint[:16]}-{tokens}.npz"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    console.print("  recording a run", style="dim")
    partial = path.with_suffix(".partial.npz")
    command = [
        *node_command("generate", str(store), "--prompt", _PROMPT, "--max-tokens", str(tokens + 1)),
        *("--ignore-eos", "--trace", str(partial), "--json"),
    ]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RECORD_SECONDS, check=False
    )
    if done.returncode != 0:
        raise UsageError(
            f"no run can be recorded: {done.stderr.strip()[-500:]}", hint="Give a recorded one with --trace."
        )
    partial.replace(path)
    return path


def _profile(fingerprint: str, result: Result) -> Profile:
    sides: dict[str, dict[str, Any]] = {"serve": {}, "node": {}}
    for name, value in result.settings.items():
        side, _, key = name.partition(".")
        sides[side][key] = value
    return Profile(
        fingerprint=fingerprint,
        serve=ServeTuned(**sides["serve"]),
        node=NodeTuned(**sides["node"]),
        limit=limit_of(result.outcome.facts),
        tokens_per_second={"tuned": 1 / result.outcome.median, "default": 1 / result.default.median},
        made=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _show(result: Result, profile: Profile) -> None:
    console = Console(highlight=False)
    for line in (
        *result.steps,
        f"settings: {describe(result.settings)}",
        f"{profile.tokens_per_second['tuned']:.3g} tokens/s; as it was: {profile.tokens_per_second['default']:.3g}",
        f"limited by: {profile.limit} ({ADVICE[profile.limit]})",
        f"kept in {profile_path(profile.fingerprint)}; --profile off leaves it out",
    ):
        console.print(line, markup=False, soft_wrap=True)
    sys.stdout.flush()

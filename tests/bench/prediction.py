"""Compares what `tierd plan --trace --measured` predicts with what is then measured, on the embedded model.

    python tests/bench/prediction.py [--rounds 2] [--tokens 28] [--bytes-per-second 5e6] [--out FILE]

Runs at 10, 50 and 100 % of the experts in RAM are what the plan is given; those at 25 %, and those with a second drive,
are what it has to predict. All of them alternate, without prefetch and history; of each arena the fastest run counts,
for what else goes on in a machine only slows. The drives are throttled, so that one of these small records takes as
long, 10 ms, as 20 MB of a large model from a drive of 2 GB/s; the second one is a mirror.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from tierd.demonstration import embedded_store

GIVEN, JUDGED = ("10%", "50%", "100%"), ("25%",)
WITHIN = 0.10
PROMPT = "It was a fine morning, and the captain went down to the harbour with his brother. " * 4


class Bench:
    """A store, a mirror of it, and a throttle for both."""

    def __init__(self, folder: Path, tokens: int, bytes_per_second: float) -> None:
        self.store = embedded_store(lambda line: print(line, file=sys.stderr)).path
        self.mirror = folder / "mirror"
        self.tokens = tokens
        shutil.copytree(self.store, self.mirror)
        plan = folder / "throttle.toml"
        plan.write_text(f"[[throttle]]\nbytes_per_second = {bytes_per_second}\n")
        self.trace = folder / "trace.npz"
        self.environment = os.environ | {
            "TIERD_FAULT_PLAN": str(plan), "TIERD_HISTORY": "off", "TIERD_PREFETCH": "off", "TIERD_NODE_HISTORY": "off",
            "XDG_STATE_HOME": str(folder / "state"),
        }  # fmt: skip

    def command(self, module: str, *arguments: object, mirrored: bool = False) -> Any:
        """The JSON that a command prints."""
        environment = self.environment | ({"TIERD_MIRROR": str(self.mirror)} if mirrored else {})
        line = [sys.executable, "-m", module, *map(str, arguments), "--json"]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        return json.loads(done.stdout)

    def run(self, arena: str, *options: object, mirrored: bool = False) -> dict[str, Any]:
        """One answer, and how much of the processors others had meanwhile."""
        psutil.cpu_percent()
        arguments = ("-p", PROMPT, "--max-tokens", self.tokens, "--ignore-eos", "--temperature", 0.8, "--seed", 5)
        answer = self.command(
            "compute_node", "generate", self.store, *arguments, "--arena", arena, *options, mirrored=mirrored
        )
        return dict(answer) | {"cpu_percent": psutil.cpu_percent()}


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    tokens: Annotated[int, typer.Option(min=8, max=1024)] = 28,
    bytes_per_second: Annotated[float, typer.Option(min=1e5, help="Of each drive.")] = 5e6,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Measure, predict, print, and exit 1 if a prediction is off by more than 10 %."""
    with tempfile.TemporaryDirectory(prefix="tierd-prediction-") as name:
        folder = Path(name)
        bench = Bench(folder, tokens, bytes_per_second)
        bench.run("50%", "--trace", bench.trace)
        kinds = [(arena, mirrored) for mirrored in (False, True) for arena in (*GIVEN, *JUDGED)]
        runs: dict[tuple[str, bool], list[dict[str, Any]]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for arena, mirrored in kinds:
                runs[arena, mirrored].append(bench.run(arena, mirrored=mirrored))
        fastest = {kind: max(found, key=speed) for kind, found in runs.items()}
        given = []
        for arena in GIVEN:
            path = folder / f"{arena}.json"
            path.write_text(json.dumps(fastest[arena, False]))
            given += ["--measured", path]
        plan = bench.command("tierd", "plan", bench.store, "--trace", bench.trace, *given)
        sizes = {size["slots"]: size for size in plan["sizes"]}
        rows = []
        for (arena, mirrored), run in fastest.items():
            key = "tokens_per_second_with_another_drive" if mirrored else "tokens_per_second"
            predicted, measured = sizes[run["arena_slots"]][key], speed(run)
            rows.append(
                {
                    "arena": arena,
                    "drives": 1 + mirrored,
                    "given": arena in GIVEN and not mirrored,
                    "predicted": predicted,
                    "measured": measured,
                    "off": predicted / measured - 1,
                    "all": [speed(one) for one in runs[arena, mirrored]],
                }
            )
    report = {"rows": rows, "node": plan["node"], "bandwidth": plan["bandwidth"], "tokens": tokens}
    print(json.dumps(report, indent=1))
    if out is not None:
        out.write_text(json.dumps(report | {"runs": [*runs.values()]}))
    sys.exit(any(abs(row["off"]) > WITHIN for row in rows if not row["given"]))


def speed(run: dict[str, Any]) -> float:
    """Tokens per second."""
    return float(run["tokens_per_second"])


if __name__ == "__main__":
    typer.run(main)

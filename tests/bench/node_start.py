"""Measures the start of a node: from the beginning of its process to the first token of the embedded model.

    python tests/bench/node_start.py [--rounds 5] [--json]

All kernels have been compiled before, so a start compiles nothing, which is counted. What an interpreter needs to
import the packages of others that a node loads, numba, grpc, pydantic and the like, is measured in turn and taken off.
A start either reads the store itself or begins with a daemon of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from tierd.demonstration import embedded_store

MOST_SECONDS: Final = 1.5
WAYS: Final = {"store read by the node": ("--in-process",), "daemon of its own": ("--arena", "100%")}
OTHERS: Final = (
    "import google.protobuf, grpc.aio, jinja2, numba, numpy, pydantic_settings, rich, tokenizers, typer, uvloop, xxhash"
)
NODE: Final = """
import sys
from numba.core import event
with event.install_recorder("numba:run_pass") as passes:
    from compute_node import cli
    code = cli._run(sys.argv[1:])
print(len(passes.buffer), file=sys.stderr)
sys.exit(code)
"""


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure, print, and exit 1 if a start compiled something or took too long."""
    store = embedded_store(lambda line: print(line, file=sys.stderr)).path
    imports: list[float] = []
    starts: dict[str, list[float]] = {way: [] for way in WAYS}
    compiled = 0
    with tempfile.TemporaryDirectory(prefix="tierd-start-") as folder:
        for number in range(rounds + 1):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", OTHERS], check=True)
            seconds = time.perf_counter() - began
            if number:
                imports.append(seconds)
            for way, options in WAYS.items():
                seconds, passes = start(store, options, Path(folder))
                if number:  # the first start may have compiled
                    starts[way].append(seconds)
                    compiled += passes
    beyond = {
        way: statistics.median(one - bare for one, bare in zip(found, imports, strict=True))
        for way, found in starts.items()
    }
    good = compiled == 0 and max(beyond.values()) <= MOST_SECONDS
    if as_json:
        answer = {"import_seconds": imports, "start_seconds": starts, "beyond_imports_seconds": beyond}
        print(json.dumps(answer | {"compiler_passes": compiled, "good": good}, indent=1))
    else:
        print(f"imports of other packages alone: {statistics.median(imports):.2f} s")
        for way, found in starts.items():
            print(
                f"{way}: first token {statistics.median(found):.2f} s after the start "
                f"({min(found):.2f} to {max(found):.2f}), {beyond[way]:.2f} s beyond imports (bar: {MOST_SECONDS:g} s)"
            )
        print("nothing was compiled" if compiled == 0 else f"the compiler ran {compiled} passes")
    sys.exit(0 if good else 1)


def start(store: Path, options: tuple[str, ...], folder: Path) -> tuple[float, int]:
    """Seconds from a node's start to its first token, and passes of the compiler until its end."""
    command = [sys.executable, "-c", NODE, "generate", str(store), "-p", "It was a", "--max-tokens", "1", "--events"]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder), "TIERD_HISTORY": "off", "TIERD_NODE_HISTORY": "off"}
    began = time.perf_counter()
    with subprocess.Popen(
        [*command, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as node:
        assert node.stdout is not None
        assert node.stderr is not None
        for line in node.stdout:
            if '"token"' in line:
                break
        else:
            sys.exit(node.stderr.read() or "the node said nothing")
        seconds = time.perf_counter() - began
        node.stdout.read()
        passes = int(node.stderr.read().split()[-1])
    return seconds, passes


if __name__ == "__main__":
    typer.run(main)

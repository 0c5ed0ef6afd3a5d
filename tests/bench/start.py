"""Measures the start of a daemon on a store of GLM-5.2's geometry: 76 layers of 256 experts of 20 MB, in sparse files.

    python tests/bench/start.py [--rounds 5] [--dir DIR] [--json]

The files take almost no space: what counts is the number of experts, not their bytes. A start lasts from the process's
beginning to the line that says it listens; what an interpreter needs to import the same modules is taken off. Memory is
the daemon's own (without the arena's), once it is ready.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from tierd.store.store import ExpertStore
from tierd.store.synthetic import make_store

LAYERS, EXPERTS, TOP_K = 76, 256, 8
HIDDEN, INTERMEDIATE = 6144, 2048
ARENA = "512MiB"
MOST_SECONDS, MOST_BYTES = 1.0, 200 * 10**6


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    folder: Annotated[Path | None, typer.Option("--dir", help="Where the sparse store is made.")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure, print, and exit 1 if a figure is missed."""
    with tempfile.TemporaryDirectory(prefix="tierd-start-", dir=folder) as path:
        began = time.perf_counter()
        store = make_store(
            Path(path) / "store", layers=range(3, 3 + LAYERS), experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN,
            intermediate=INTERMEDIATE, format="int4-g64", fill="sparse",
        )  # fmt: skip
        made = time.perf_counter() - began
        began = time.perf_counter()
        ExpertStore.open(store.path)
        opened = time.perf_counter() - began
        imports, starts, sizes = [], [], []
        for number in range(rounds):
            imports.append(import_seconds())
            seconds, nbytes = start(store.path, Path(path) / f"{number}.sock")
            starts.append(seconds)
            sizes.append(nbytes)
    answer = {
        "experts": store.geometry.experts_total,
        "expert_bytes": store.geometry.expert_bytes,
        "make_seconds": made,
        "open_seconds": opened,
        "import_seconds": imports,
        "start_seconds": starts,
        "beyond_imports_seconds": statistics.median(a - b for a, b in zip(starts, imports, strict=True)),
        "own_bytes": statistics.median(sizes),
    }
    good = answer["beyond_imports_seconds"] < MOST_SECONDS and answer["own_bytes"] < MOST_BYTES
    if as_json:
        print(json.dumps(answer | {"good": good}, indent=1))
    else:
        print(f"{answer['experts']:,} experts, {answer['expert_bytes'] / 1e9:.0f} GB in sparse files")
        print(f"made in {made:.2f} s, opened and checked in {opened:.2f} s")
        print(
            f"ready {statistics.median(starts):.2f} s after the start ({min(starts):.2f} to {max(starts):.2f}), "
            f"{answer['beyond_imports_seconds']:.2f} s beyond imports (aim: below {MOST_SECONDS:g} s)"
        )
        print(f"{answer['own_bytes'] / 1e6:.0f} MB beyond the arena (aim: below {MOST_BYTES / 1e6:.0f} MB)")
    sys.exit(0 if good else 1)


def import_seconds() -> float:
    """How long a fresh interpreter takes to import what `tierd serve` imports."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import tierd.cli, tierd.commands.serve"], check=True)
    return time.perf_counter() - began


def start(store: Path, socket: Path) -> tuple[float, int]:
    """Seconds until a daemon says that it listens, and the memory that it has for itself then."""
    command = [
        sys.executable,
        "-m",
        "tierd",
        "serve",
        str(store),
        "--listen",
        f"unix:{socket}",
        "--http",
        "off",
        "--history",
        "off",
    ]
    began = time.perf_counter()
    with subprocess.Popen(
        [*command, "--arena", ARENA, "--log-level", "error"], stdout=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stdout is not None
        try:
            for line in daemon.stdout:
                if line.startswith("listening on"):
                    break
            else:
                sys.exit("the daemon did not start")
            seconds = time.perf_counter() - began
            return seconds, own_bytes(daemon.pid)
        finally:
            daemon.terminate()


def own_bytes(pid: int) -> int:
    """Resident memory without shared memory, which is the arena's."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    fields = {name: int(kilobytes) << 10 for name, kilobytes in re.findall(r"(\w+):\s+(\d+) kB", text)}
    return fields["VmRSS"] - fields["RssShmem"]


if __name__ == "__main__":
    typer.run(main)

"""One node of `bench near`, a process of its own: it decodes a batch whenever a line comes on its standard input.

`python -m compute_node.bench.near_node OPTIONS`, with options as JSON. It ends with its input.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from compute_node.bench.bare_steps import run_bare_steps
from compute_node.engine.kernel_path import kernel_path
from compute_node.engine.model import Model, ModelOptions
from tierd.client.open import open_source

__all__ = ["run"]


def run(options: dict[str, Any], lines: Iterable[str], say: Callable[[dict[str, Any]], None]) -> None:
    """Decode as told.

    Args:
        options: `store`, `numerics`, `threads`, `prompts`: token ids of each sequence, and `tokens` of each answer.
        lines: one for each time that all is to be decoded.
        say: takes an object for each line: `answers`, `seconds`, and `private_bytes`: RAM that is the process's own.
    """
    prompts, tokens = options["prompts"], options["tokens"]
    source = open_source(options["store"], name="bench near", numerics=options["numerics"], kernel_path=kernel_path())
    how = ModelOptions(
        numerics=options["numerics"],
        threads=options["threads"],
        context=max(map(len, prompts)) + tokens + 1,
        sequences=len(prompts),
    )
    with closing(source), Model(source, how) as model:
        say({"ready": True})
        for _ in lines:
            begun = time.perf_counter()
            done = run_bare_steps(model, prompts, tokens)
            seconds = time.perf_counter() - begun
            say({"answers": done.answers, "seconds": seconds, "private_bytes": _private_bytes()})


def _private_bytes() -> int:
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def _say(told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run(json.loads(sys.argv[1]), sys.stdin, _say)

"""One node of `bench far`, a process of its own: it computes when a line on its standard input says so.

`python -m compute_node.bench.far_node OPTIONS`, with options as JSON; each line of input is a number of tokens, each
line of output what they took. It ends with its input.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from compute_node.bench.far_link import NODE_LINK
from compute_node.bench.forced_routes import force_routes
from compute_node.bench.token_walk import TokenWalk
from compute_node.engine.arithmetic import named_numerics
from compute_node.engine.generate import Finished, GenerationParams, Generator
from compute_node.engine.kernel_path import kernel_path
from compute_node.engine.model import Model, ModelOptions
from compute_node.models.decoder_program import DecoderProgram
from compute_node.text.tokenizer import Tokenizer
from tierd.client.open import FarOptions, open_source

__all__ = ["run"]


def run(options: dict[str, Any], lines: Any, say: Callable[[dict[str, Any]], None]) -> None:
    """Compute as told.

    Args:
        options: `store`, `experts`, `workers`, `arena`, `numerics`, `threads`; `routes`, a file with routes to force,
            or `prompt`, a text to continue; `tokens`, the most that will be asked for.
        lines: numbers of tokens, one each.
        say: takes an object for each line: `seconds`, `token_ids`, `link_bytes`, `requested`, `tiers`.
    """
    source = open_source(
        options["store"],
        name="bench far",
        numerics=named_numerics(options["numerics"]),
        kernel_path=kernel_path(),
        arena=options["arena"],
        far=FarOptions(experts=options["experts"], workers=tuple(options["workers"]), store_cache="0"),
    )
    routes = np.load(options["routes"]) if options["routes"] else None

    def adapt(program: DecoderProgram) -> DecoderProgram:
        return program if routes is None else force_routes(program, routes)

    how = ModelOptions(numerics=options["numerics"], context=options["tokens"] + 16, threads=options["threads"])
    with closing(source), Model(source, how, adapt=adapt) as model:
        work = _walking(model) if routes is not None else _continuing(model, options["prompt"])
        say({"ready": True})
        for line in lines:
            before, stats = _link_bytes(), source.stats
            asked, tiers = stats.requested, dict(stats.tiers)
            begun = time.perf_counter()
            ids = work(int(line))
            say({
                "seconds": time.perf_counter() - begun,
                "token_ids": ids,
                "link_bytes": _link_bytes() - before,
                "requested": stats.requested - asked,
                "tiers": {name: count - tiers.get(name, 0) for name, count in stats.tiers.items()},
            })  # fmt: skip


def _walking(model: Model) -> Callable[[int], list[int]]:
    """Tokens are given, as routes are: what the model would say is noted."""
    walk = TokenWalk(model)
    return lambda tokens: [int(walk.step().argmax()) for _ in range(tokens)]


def _continuing(model: Model, prompt: str) -> Callable[[int], list[int]]:
    tokenizer = Tokenizer.from_store(model.source.store)
    assert tokenizer is not None
    generator = Generator(model, tokenizer)

    def work(tokens: int) -> list[int]:
        *_, last = generator.generate(tokenizer.encode(prompt), GenerationParams(max_tokens=tokens, ignore_eos=True))
        assert isinstance(last, Finished)
        return list(last.token_ids)

    return work


def _link_bytes() -> int:
    """Bytes that went over this namespace's end of the link, both ways, headers included; 0 where there is none."""
    folder = Path("/sys/class/net") / NODE_LINK / "statistics"
    if not folder.is_dir():
        return 0
    return sum(int((folder / name).read_text()) for name in ("rx_bytes", "tx_bytes"))


def _say(told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run(json.loads(sys.argv[1]), sys.stdin, _say)

"""The decode step and prefill on a real geometry with random weights, everything resident."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compute_node.bench.forced_routes import drawn_apart
from compute_node.bench.plain_read import plain_read
from compute_node.bench.quiet import Quiet
from compute_node.bench.random_model import RandomModel
from compute_node.bench.timeline import Timeline
from compute_node.bench.token_walk import TokenWalk
from compute_node.engine.executor import Executor
from compute_node.engine.model import Model, ModelOptions
from tierd.client.in_process import InProcess
from tierd.client.source import Phase
from tierd.store.reading import huge_page_buffer

__all__ = ["StepSpeed", "measure_prefill", "measure_step", "resident"]


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """A decode step in three executions, alternating with plain reads; seconds per token of each round."""

    bytes_of_a_token: int
    read_bytes: int
    fused: list[float]
    ops: list[float]
    read: list[float]
    python: list[float]
    same_logits: bool

    def as_object(self) -> dict[str, Any]:
        """Ratios are medians over rounds; the raw sides are there."""
        rate = self.read_bytes / np.array(self.read)
        reached = self.bytes_of_a_token / np.array(self.fused)
        return {
            "bandwidth_share": float(np.median(reached / rate)),
            "fused_ratio": float(np.median(np.array(self.ops) / np.array(self.fused))),
            "python_seconds_per_token": float(np.median(self.python)),
            "tokens_per_second": float(1 / np.median(self.fused)),
            "bytes_per_token": self.bytes_of_a_token,
            "bytes_per_second": float(np.median(reached)),
            "read_bytes_per_second": float(np.median(rate)),
            "same_logits": self.same_logits,
            "fused_seconds": self.fused,
            "op_by_op_seconds": self.ops,
            "read_seconds": self.read,
            "python_seconds": self.python,
        }


def resident(random: RandomModel, tell: Callable[[str], None]) -> InProcess:
    """A source that has every expert in RAM."""
    source = InProcess(random)
    for number, entry in enumerate(random.geometry.layers):
        tell(f"random experts, layer {number + 1} of {len(random.geometry.layers)}")
        source.visit(entry.layer, range(entry.experts), lambda *_: None, step=0, phase=Phase.PREFILL)
    return source


def measure_step(
    config: dict[str, Any],
    *,
    threads: int | None,
    experts: str,
    numerics: str,
    rounds: int,
    tokens: int,
    read_bytes: int,
    timeline: Path | None = None,
    tell: Callable[[str], None],
) -> tuple[StepSpeed, dict[str, Any]]:
    """Decode steps, fused and op by op, and plain reads, in turn; routes are given, drawn apart for each token.

    Args:
        config: config.json of the model.
        threads: native threads.
        experts: format of the experts.
        numerics: of the kernels.
        rounds: how often each side has its turn.
        tokens: of one turn.
        read_bytes: read plainly, a multiple of a page.
        timeline: file for one more token of each execution, op by op, as a Chrome trace.
        tell: takes a line when something begins.
    """
    random = RandomModel(config, experts=experts)
    source = resident(random, tell)
    buffer = huge_page_buffer(read_bytes)
    buffer.view(np.int64)[:] = 1
    read, _ = plain_read(buffer)
    sides: dict[str, list[float]] = {"fused": [], "ops": [], "read": []}
    python: list[float] = []
    context = min(4096, (rounds + 1) * tokens + 2)
    with ExitStack() as stack:
        walks = {}
        for execution in ("fused", "ops"):
            options = ModelOptions(numerics=numerics, execution=execution, context=context, threads=threads)
            walks[execution] = TokenWalk(
                stack.enter_context(Model(source, options, adapt=drawn_apart(random.geometry)))
            )
        executor = stack.enter_context(Executor(threads))
        same = np.array_equal(walks["fused"].step(), walks["ops"].step())
        tell("decoding")
        with Quiet() as quiet:
            for number in range(rounds + 1):
                for name, walk in walks.items():
                    seconds, outside = walk.run(tokens)
                    if number:
                        sides[name].append(seconds / tokens)
                        if name == "fused":
                            python.append(outside / tokens)
                begun = executor.native_seconds
                executor.run(read)
                if number:
                    sides["read"].append(executor.native_seconds - begun)
        if timeline is not None:
            _watch(walks).write(timeline)
    speed = StepSpeed(
        random.dense_bytes_of_a_token + random.expert_bytes_of_a_token, read_bytes,
        sides["fused"], sides["ops"], sides["read"], python, same,
    )  # fmt: skip
    return speed, quiet.report() | {"threads": walks["fused"].model.threads, "rounds": rounds, "tokens": tokens}


def _watch(walks: Mapping[str, TokenWalk]) -> Timeline:
    """One token of each walk, and what native code did in it."""
    watched = Timeline()
    for name, walk in walks.items():
        walk.model.watch(watched.computed)
        begun = time.monotonic()
        walk.step()
        watched.span("tokens", name, begun, time.monotonic())
    return watched


def measure_prefill(
    config: dict[str, Any],
    *,
    threads: int | None,
    experts: str,
    numerics: str,
    rows: int,
    tokens: int,
    rounds: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Tokens per second of a prompt of `tokens`, computed `rows` at a time; every round begins anew."""
    random = RandomModel(config, experts=experts)
    source = resident(random, tell)
    options = ModelOptions(numerics=numerics, context=tokens, rows=rows, threads=threads)
    with Model(source, options, adapt=drawn_apart(random.geometry)) as model, Quiet() as quiet:
        found = []
        for number in range(rounds):
            tell(f"prefill {number + 1} of {rounds}")
            walk = TokenWalk(model)
            found.append(walk.prefill(tokens))
            walk.end()
    return {
        "tokens": tokens,
        "rows": rows,
        "tokens_per_second": float(tokens / np.median(found)),
        "seconds": found,
        **quiet.report(),
    }

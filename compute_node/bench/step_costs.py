"""What a decode step costs by the length of its texts and their number, beside the bytes that it has to move."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compute_node.bench.forced_routes import drawn_apart
from compute_node.bench.plain_read import plain_read
from compute_node.bench.quiet import Quiet
from compute_node.bench.random_model import RandomModel
from compute_node.bench.step_speed import resident
from compute_node.engine.executor import Executor
from compute_node.engine.kv_cache import Sequence as Text
from compute_node.engine.model import Model, ModelOptions
from compute_node.kernels.pages import PAGE
from tierd.client.source import Phase
from tierd.errors import UsageError
from tierd.store.reading import huge_page_buffer

__all__ = ["StepCost", "measure_costs"]


@dataclass(slots=True)
class StepCost:
    """Steps with so many texts of one length, alternating with plain reads of memory.

    Attributes:
        context: tokens of each text before the step.
        batch: texts.
        bytes_of_a_step: weights, scales and keys and values, each counted once, on average.
        seconds: of a step, one figure per round.
        read_rates: bytes per second of plain reading, one per round.
    """

    context: int
    batch: int
    bytes_of_a_step: float = 0.0
    seconds: list[float] = field(default_factory=list)
    read_rates: list[float] = field(default_factory=list)

    def as_object(self) -> dict[str, Any]:
        """Medians over the rounds, and both raw sides."""
        step, rate = float(np.median(self.seconds)), float(np.median(self.read_rates))
        limits = self.bytes_of_a_step / np.array(self.read_rates)
        return {
            "context": self.context,
            "batch": self.batch,
            "seconds_per_step": step,
            "seconds_per_token": step / self.batch,
            "bytes_per_step": self.bytes_of_a_step,
            "limit_seconds_per_step": self.bytes_of_a_step / rate,
            "share_of_limit": float(np.median(limits / np.array(self.seconds))),
            "step_seconds": self.seconds,
            "read_bytes_per_second": self.read_rates,
        }


def measure_costs(
    config: dict[str, Any],
    *,
    threads: int | None,
    experts: str,
    numerics: str,
    contexts: Sequence[int],
    batches: Sequence[int],
    rounds: int,
    steps: int,
    read_bytes: int,
    tell: Callable[[str], None],
) -> tuple[list[StepCost], dict[str, Any]]:
    """Decode steps for every length and number of texts, everything resident.

    Each text's tokens are other ones, and so are its experts: routes are drawn apart, like those of `bench serve`.

    Args:
        config: config.json of the model.
        threads: native threads.
        experts: format of the experts.
        numerics: of the kernels.
        contexts: tokens that each text has before the step.
        batches: numbers of texts.
        rounds: how often each has its turn.
        steps: of one turn.
        read_bytes: read plainly in each turn, a multiple of a page.
        tell: takes a line when something begins.

    Returns:
        The costs, and what `Quiet` saw.

    Raises:
        UsageError: texts that do not fit the KV cache, at most a quarter of RAM.
    """
    random = RandomModel(config, experts=experts)
    sizes = random.geometry
    source, buffer, most = resident(random, tell), huge_page_buffer(read_bytes), max(batches)
    buffer.view(np.int64)[:] = 1
    read, _ = plain_read(buffer)
    options = ModelOptions(
        numerics=numerics, context=max(contexts) + 1, sequences=most, rows=most, head_rows=most, threads=threads
    )
    found = []
    with (
        Model(source, options, adapt=drawn_apart(sizes)) as model,
        Executor(threads) as executor,
        Quiet() as quiet,
    ):
        for name in model.cache.layout.planes:
            model.cache.plane(name).fill(0.01)  # memory that was never written is read from one page of zeros
        token_bytes = model.cache.layout.page_bytes // PAGE
        expert_bytes = random.expert_bytes_of_a_token // (sizes.top_k * len(sizes.layers))
        for context in contexts:
            tell(f"texts of {context} tokens")
            texts = [_text(model, context, number) for number in range(most)]
            costs = [StepCost(context, batch) for batch in batches]
            used = [0] * len(costs)
            for number in range(rounds + 1):
                for place, cost in enumerate(costs):
                    before = model.experts_chosen
                    seconds = _steps(model, texts[: cost.batch], steps, number)
                    begun = executor.native_seconds
                    executor.run(read)
                    if number:
                        used[place] += model.experts_chosen - before
                        cost.seconds.append(seconds / steps)
                        cost.read_rates.append(read_bytes / (executor.native_seconds - begun))
            for cost, chosen in zip(costs, used, strict=True):
                cost.bytes_of_a_step = (
                    random.dense_bytes_of_a_token
                    + expert_bytes * chosen / (rounds * steps)
                    + cost.batch * context * token_bytes
                )
            found += costs
            for text in texts:
                model.cache.give_back(text)
        threads_used = model.threads
    return found, quiet.report() | {"threads": threads_used, "rounds": rounds, "steps": steps}


def _text(model: Model, context: int, number: int) -> Text:
    """A text of so many tokens, which no other has, with room for one more; what the cache holds of it is arbitrary."""
    text = model.cache.take()
    if not model.cache.reserve(text, context + 1):
        raise UsageError(
            f"texts of {context} tokens do not fit the KV cache of {model.cache.pool.pages * PAGE} tokens",
            hint="Use fewer --layers, or smaller --contexts and --batches.",
        )
    model.cache.advance(text, [number] * context)
    return text


def _steps(model: Model, texts: Sequence[Text], steps: int, number: int) -> float:
    """Seconds of steps that all compute the token behind each text: the texts stay as long as they are."""
    positions = [len(text.tokens) for text in texts]
    generator = np.random.Generator(np.random.Philox(number))
    rows = range(len(texts))
    begun = time.perf_counter()
    for _ in range(steps):
        tokens = generator.integers(0, model.config.vocab_size, len(texts)).tolist()
        model.forward(tokens, positions, texts, phase=Phase.DECODE, logits_of=rows)
    return time.perf_counter() - begun

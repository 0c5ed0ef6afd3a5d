"""Decode steps of one model for so many sequences at once, with nothing around them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from compute_node.engine.model import Model
from tierd.client.source import Phase

__all__ = ["BareSteps", "run_bare_steps"]


@dataclass(frozen=True, slots=True)
class BareSteps:
    """Steps that were run.

    Attributes:
        seconds: of each step.
        answers: greedy tokens of each sequence.
    """

    seconds: list[float]
    answers: list[tuple[int, ...]]


def run_bare_steps(model: Model, prompts: Sequence[Sequence[int]], tokens: int) -> BareSteps:
    """Computes prompts one after the other, then decodes all of them together, greedily.

    Args:
        model: with places for so many sequences.
        prompts: one of each sequence.
        tokens: of each answer, at least one.
    """
    cache = model.cache
    sequences, answers = [cache.take() for _ in prompts], []
    seconds = []
    for sequence, prompt in zip(sequences, prompts, strict=True):
        logits = model.extend(sequence, list(prompt), phase=Phase.PREFILL, keep=False)
        assert logits is not None
        answers.append([model.likeliest[0]])
    for _ in range(tokens - 1):
        last = [answer[-1] for answer in answers]
        positions = [len(sequence.tokens) for sequence in sequences]
        for sequence in sequences:
            sequence.require(1)
            cache.reserve(sequence, 1)
        begun = time.perf_counter()
        logits = model.forward(
            last,
            positions,
            sequences,
            phase=Phase.DECODE,
            logits_of=range(len(sequences)),
        )
        seconds.append(time.perf_counter() - begun)
        assert logits is not None
        for sequence, answer, token in zip(sequences, answers, model.likeliest, strict=True):
            cache.advance(sequence, answer[-1:])
            answer.append(token)
    for sequence in sequences:
        cache.give_back(sequence)
    return BareSteps(seconds, [tuple(answer) for answer in answers])

"""Generation: prompt in chunks, then token by token, as a stream of events that carry text and time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.kv_cache import Sequence
from compute_node.engine.language_model import LanguageModel
from compute_node.engine.limit import DecodeCost
from compute_node.engine.model import Cancelled
from compute_node.engine.route_recorder import RouteRecorder
from compute_node.engine.sampler import Sampling, choose_token
from compute_node.engine.stop import StopStrings, stop_token_ids
from compute_node.text.tokenizer import Tokenizer
from tierd.client.source import Phase
from tierd.errors import LimitExceeded, UsageError

__all__ = ["FinishReason", "Finished", "GenerationParams", "Generator", "TokenEvent"]

Logits = NDArray[np.float32]


class FinishReason(Enum):
    """Why an answer ended."""

    STOP = "stop"
    """The model ended it, or a stop string appeared."""
    LENGTH = "length"
    """`max_tokens` were generated, or the context is full."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    """The request's own bound on time was reached."""
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """What to generate.

    Attributes:
        max_tokens: most tokens of the answer; what does not fit the context is cut off, not refused.
        sampling: how tokens are chosen.
        stop: strings that end the answer; they are not part of it.
        stop_token_ids: tokens that end the answer beside the checkpoint's own; they are not part of its text.
        min_tokens: no token that ends the answer is chosen before so many others were.
        ignore_eos: go on after the checkpoint's end-of-text token.
    """

    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False

    def ends(self, end_of_text: frozenset[int]) -> frozenset[int]:
        """Tokens that end an answer, given those of the checkpoint."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else end_of_text)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token was chosen.

    Attributes:
        token_id: its id.
        text: text that is now certain; may be empty, since characters and stop strings may span tokens.
        seconds: since `generate` was called.
    """

    token_id: int
    text: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event.

    Attributes:
        reason: why the answer ended.
        text: text that was held back until now.
        token_ids: all tokens of the answer, the end-of-text token included where there is one.
        prompt_tokens: length of the prompt.
        reused_tokens: how many of them were in the KV cache already.
        seconds: from the call of `generate` to this event.
        time_to_first_token_seconds: None if there is no token.
        decode: what the steps after the first token took.
        experts_chosen: unique experts that the router chose, over layers and steps.
        compute_seconds: time in steps spent computing.
        wait_seconds: time in steps spent waiting for experts.
    """

    reason: FinishReason
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    reused_tokens: int
    seconds: float
    time_to_first_token_seconds: float | None
    decode: DecodeCost
    experts_chosen: int
    compute_seconds: float
    wait_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first, per second since the first; 0 for a single token."""
        steps = len(self.token_ids) - 1
        return steps / self.decode.seconds if steps > 0 and self.decode.seconds > 0 else 0.0


class Generator:
    """Generates answers with one model, one at a time.

    Args:
        model: loaded model.
        tokenizer: turns token ids into text; None: events carry no text, and stop strings are refused.

    Attributes:
        recorder: watches all steps, if there is one.
    """

    def __init__(self, model: LanguageModel, tokenizer: Tokenizer | None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.recorder: RouteRecorder | None = None
        self.stop_tokens = stop_token_ids(model.source.store, model.config.eos_token_ids)

    def generate(
        self,
        prompt: list[int],
        params: GenerationParams,
        *,
        sequence: Sequence | None = None,
        cancelled: Cancelled | None = None,
    ) -> Iterator[TokenEvent | Finished]:
        """Checks the request at once, then yields a `TokenEvent` per token and one `Finished`.

        Args:
            prompt: token ids, at least one.
            params: what to generate.
            sequence: continue in this place of the KV cache: the longest prefix it shares with the prompt is not
                computed again, which changes no bit. None: a fresh one, given back at the end.
            cancelled: asked between tokens, and between layers where a step is not one native call or it is a
                `CancelWord`; True ends the answer with `FinishReason.CANCELLED`.

        Raises:
            UsageError: empty prompt, or stop strings without a tokenizer.
            LimitExceeded: the prompt does not fit the context, or holds an unknown token id.
        """
        context = self.model.context
        if not prompt:
            raise UsageError("the prompt has no tokens", hint="Give some text to continue.")
        if len(prompt) >= context:
            raise LimitExceeded(
                f"the prompt of {len(prompt)} tokens does not fit the context of {context} tokens",
                hint="Use a larger --context or a shorter text.",
            )
        if params.max_tokens < 1:
            raise UsageError(f"--max-tokens {params.max_tokens} is below 1")
        if params.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer, and this store has none")
        stop = StopStrings(params.stop)
        return self._run(prompt, params, stop, sequence, cancelled or (lambda: False))

    def _run(
        self,
        prompt: list[int],
        params: GenerationParams,
        stop: StopStrings,
        given: Sequence | None,
        cancelled: Cancelled,
    ) -> Iterator[TokenEvent | Finished]:
        model, begun = self.model, time.perf_counter()
        if self.recorder is not None:
            self.recorder.begin_text()
        sequence = model.cache.take() if given is None else given
        experts, computed, waited = _counters(model)
        # At least the last prompt token is computed: its logits are wanted.
        reused = model.cache.keep_prefix(sequence, prompt[:-1])
        decoder = self.tokenizer.stream(continues=True) if self.tokenizer is not None else None
        tokens: list[int] = []
        ends = params.ends(self.stop_tokens)
        first = last = begun
        cost_first = cost_last = _decode_cost(model, begun)
        reason: FinishReason | None = None
        try:
            logits = self._prefill(sequence, prompt[reused:], cancelled)
            while reason is None:
                if logits is None or cancelled():
                    reason = FinishReason.CANCELLED
                    break
                position = len(prompt) + len(tokens)
                token = choose_token(
                    logits,
                    position,
                    params.sampling,
                    prompt=prompt,
                    generated=tokens,
                    forbidden=ends if len(tokens) < params.min_tokens else (),
                    likeliest=model.likeliest[0] if model.likeliest else None,
                )
                tokens.append(token)
                last = time.perf_counter()
                cost_last = _decode_cost(model, last)
                if len(tokens) == 1:
                    first, cost_first = last, cost_last
                ended = token in ends
                text = stop.push(decoder.push(token)) if decoder is not None and not ended else ""
                if ended or stop.stopped:
                    reason = FinishReason.STOP
                elif len(tokens) >= params.max_tokens or position + 1 >= model.context:
                    reason = FinishReason.LENGTH
                yield TokenEvent(token, text, last - begun)
                if reason is None:
                    logits = self._step(sequence, token, cancelled)
        finally:
            if given is None:
                model.cache.give_back(sequence)
        tail = "" if decoder is None or stop.stopped else stop.push(decoder.flush()) + stop.flush()
        now_experts, now_computed, now_waited = _counters(model)
        yield Finished(
            reason=reason,
            text=tail,
            token_ids=tuple(tokens),
            prompt_tokens=len(prompt),
            reused_tokens=reused,
            seconds=time.perf_counter() - begun,
            time_to_first_token_seconds=first - begun if tokens else None,
            decode=cost_last.since(cost_first),
            experts_chosen=now_experts - experts,
            compute_seconds=now_computed - computed,
            wait_seconds=now_waited - waited,
        )

    def _prefill(self, sequence: Sequence, prompt: list[int], cancelled: Cancelled) -> Logits | None:
        """The logits of the prompt's last token, float32 [1, vocabulary]; None if cancelled."""
        rows = self.model.rows
        last = (len(prompt) - 1) // rows * rows
        for start in range(0, last + 1, rows):
            chunk, wanted = prompt[start : start + rows], (-1,) if start == last else ()
            logits = self._extend(sequence, chunk, Phase.PREFILL, wanted, cancelled)
            if logits is None or start == last:
                break
        return logits

    def _step(self, sequence: Sequence, token: int, cancelled: Cancelled) -> Logits | None:
        return self._extend(sequence, [token], Phase.DECODE, (-1,), cancelled)

    def _extend(
        self, sequence: Sequence, tokens: list[int], phase: Phase, logits_of: tuple[int, ...], cancelled: Cancelled
    ) -> Logits | None:
        recorder = self.recorder
        observe = None if recorder is None else recorder.observe
        logits = self.model.extend(
            sequence, tokens, phase=phase, logits_of=logits_of, cancelled=cancelled, observe=observe, keep=False
        )
        if recorder is not None and logits is not None:
            recorder.end_step(tokens, prefill=phase is Phase.PREFILL)
        return logits


def _counters(model: LanguageModel) -> tuple[int, float, float]:
    return model.experts_chosen, model.times.compute_seconds, model.times.wait_seconds


def _decode_cost(model: LanguageModel, now: float) -> DecodeCost:
    """All that was spent until now; differences count."""
    times, stats = model.times, model.source.stats
    return DecodeCost(
        seconds=now,
        compute_seconds=times.compute_seconds,
        wait_seconds=times.wait_seconds,
        message_seconds=stats.wait_by_outcome["hit"],
        missed_experts=stats.outcomes["miss"] + stats.outcomes["joined"],
    )

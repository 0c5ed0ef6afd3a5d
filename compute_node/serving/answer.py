"""One request on its way: from the logits of a step to tokens, text and the reason why it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.sampler import choose_token
from compute_node.engine.stop import StopStrings
from compute_node.serving.requests import MOST_LOGPROBS, Done, FinishReason, PromptScores, Request, Token, Usage
from compute_node.serving.scores import Scored, scored
from compute_node.text.tokenizer import Tokenizer
from tierd.errors import LimitExceeded, TierdError, UsageError

__all__ = ["Answer"]

Logits = NDArray[np.float32]


class Answer:
    """What a request has become so far. Not thread-safe; it sees no clock and no model.

    Args:
        request: what was asked.
        tokenizer: makes text of tokens; None: there is no text.
        end_of_text: the checkpoint's tokens that end an answer.
        vocab_size: token ids are below it.
        context: most tokens of prompt and answer.

    Attributes:
        request: as given.
        tokens: prompt and answer so far.
        reason: why the answer ended; None as long as it goes on.
        first_at: when the first token was chosen, in seconds since submission.

    Raises:
        UsageError: an empty prompt, options outside their limits, stop strings without a tokenizer.
        LimitExceeded: a prompt that does not fit the context, or an unknown token id.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        end_of_text: frozenset[int],
        *,
        vocab_size: int,
        context: int,
    ) -> None:
        _check(request, vocab_size=vocab_size, context=context, text=tokenizer is not None)
        params = request.params
        self.request = request
        self.tokens = list(request.prompt)
        self.reason: FinishReason | None = None
        self.first_at: float | None = None
        self._context = context
        self._generated: list[int] = []
        self._ends = params.ends(end_of_text)
        self._decoder = tokenizer.stream(continues=True) if tokenizer is not None else None
        self._stop = StopStrings(params.stop)
        self._scores: list[Scored | None] = [None]
        self._experts: dict[str, int] = {}
        self._wait_seconds = self._compute_seconds = 0.0

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    def wanted(self, start: int, count: int) -> list[int]:
        """Which of the tokens at these positions have logits that are wanted, as offsets; rising."""
        last = len(self.tokens) - 1 - start
        if not self.request.prompt_logprobs:
            return [last] if last < count and self.request.params.max_tokens else []
        # A row says how likely the next token is; after its pages were lost, some rows come for the second time.
        first, end = max(0, len(self._scores) - 1 - start), min(count, self.prompt_length - 1 - start)
        return [*range(first, end), *([last] if last < count and self.request.params.max_tokens else [])]

    def step(
        self,
        start: int,
        offsets: Sequence[int],
        rows: Logits,
        likeliest: Sequence[int],
        seconds: float,
        *,
        complete: bool,
    ) -> Sequence[Token | PromptScores]:
        """What follows from a step.

        Args:
            start: position of the step's first token.
            offsets: of the tokens that were `wanted`.
            rows: their logits, float32 [offsets, vocabulary].
            likeliest: of each the token with the largest logit, see `choose_token`; empty: not known.
            seconds: since submission.
            complete: all tokens have been computed now.

        Raises:
            TierdError: the logits are no numbers, or the constraint allows nothing.
        """
        events: list[Token | PromptScores] = []
        if self.request.prompt_logprobs and len(self._scores) < self.prompt_length:
            for offset, logits in zip(offsets, rows, strict=True):
                if start + offset + 1 < self.prompt_length:
                    token = self.tokens[start + offset + 1]
                    self._scores.append(scored(logits, token, self.request.logprobs or 0))
        if not complete:
            return events
        if self.request.prompt_logprobs and not self._generated:
            events.append(_prompt_scores(self._scores))
        if self.request.params.max_tokens:
            events.append(self.choose(rows[-1], likeliest[-1] if likeliest else None, seconds))
        else:
            self.reason = FinishReason.LENGTH
        return events

    def note(self, experts: Mapping[str, int], wait_seconds: float, compute_seconds: float) -> None:
        """A step that the request took part in is over."""
        for outcome, count in experts.items():
            self._experts[outcome] = self._experts.get(outcome, 0) + count
        self._wait_seconds += wait_seconds
        self._compute_seconds += compute_seconds

    def done(
        self,
        reason: FinishReason,
        *,
        cached_tokens: int,
        seconds: float,
        queue_seconds: float,
        error: TierdError | None = None,
    ) -> Done:
        """The last event, with the text that was held back."""
        tail = ""
        if self._decoder is not None and not self._stop.stopped:
            tail = self._stop.push(self._decoder.flush()) + self._stop.flush()
        usage = Usage(
            prompt_tokens=self.prompt_length,
            cached_tokens=cached_tokens,
            completion_tokens=len(self._generated),
            seconds=seconds,
            queue_seconds=queue_seconds,
            time_to_first_token_seconds=self.first_at,
            experts=dict(self._experts),
            wait_seconds=self._wait_seconds,
            compute_seconds=self._compute_seconds,
        )
        return Done(reason, tail, usage, error)

    def choose(self, logits: Logits, likeliest: int | None, seconds: float) -> Token:
        """The next token, all before it having been computed; sets `reason` where it is the last.

        Args:
            logits: of the last token, float32 [vocabulary].
            likeliest: the token with the largest one, see `choose_token`; None: not known.
            seconds: since submission.

        Raises:
            TierdError: see `step`.
        """
        params, constraint = self.request.params, self.request.constraint
        token = choose_token(
            logits,
            len(self.tokens),
            params.sampling,
            prompt=self.request.prompt,
            generated=self._generated,
            allowed=None if constraint is None else constraint.mask(),
            forbidden=self._ends if len(self._generated) < params.min_tokens else (),
            likeliest=likeliest,
        )
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if self.request.logprobs is not None:
            logprob, top = scored(logits, token, self.request.logprobs)
        self.tokens.append(token)
        self._generated.append(token)
        if self.first_at is None:
            self.first_at = seconds
        ended, text = token in self._ends, ""
        if not ended:
            if constraint is not None:
                constraint.advance(token)
                ended = constraint.finished
            if self._decoder is not None:
                text = self._stop.push(self._decoder.push(token))
        if ended or self._stop.stopped:
            self.reason = FinishReason.STOP
        elif len(self._generated) >= params.max_tokens or len(self.tokens) >= self._context:
            self.reason = FinishReason.LENGTH
        return Token(token, text, logprob, top, seconds)


def _prompt_scores(scores: Sequence[Scored | None]) -> PromptScores:
    return PromptScores(
        tuple(None if score is None else score[0] for score in scores),
        tuple(() if score is None else score[1] for score in scores),
    )


def _check(request: Request, *, vocab_size: int, context: int, text: bool) -> None:
    prompt, params, deadline = request.prompt, request.params, request.deadline_seconds
    if not prompt:
        raise UsageError("the prompt has no tokens", hint="Give some text to continue.")
    if len(prompt) >= context:
        raise LimitExceeded(
            f"the prompt of {len(prompt)} tokens does not fit the context of {context} tokens",
            hint="Use a shorter text; or start the node with a larger --context or --kv-cache.",
        )
    for what, tokens in (
        ("token id", prompt),
        ("stop token", params.stop_token_ids),
        ("logit bias for token", [token for token, _ in params.sampling.logit_bias]),
    ):
        for token in (min(tokens), max(tokens)) if tokens else ():
            if not 0 <= token < vocab_size:
                raise LimitExceeded(f"{what} {token} is outside the vocabulary of {vocab_size} tokens")
    if params.max_tokens < 0 or params.min_tokens < 0:
        raise UsageError(f"max_tokens {params.max_tokens} or min_tokens {params.min_tokens} is below 0")
    if request.logprobs is not None and not 0 <= request.logprobs <= MOST_LOGPROBS:
        raise UsageError(f"logprobs {request.logprobs} is outside 0 to {MOST_LOGPROBS}")
    if params.stop and not text:
        raise UsageError("stop strings need a tokenizer, and this store has none")
    if deadline is not None and not deadline > 0:
        raise UsageError(f"a deadline of {deadline} seconds is not above 0")

"""/v1/completions: the model continues texts, or rows of token ids."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import Field

from compute_node.server.answering import Answering
from compute_node.server.chat import END_OF_STREAM, PULSE, event_frame
from compute_node.server.chat_request import StreamOptions
from compute_node.server.choice import Choice, TextRules
from compute_node.server.completion_logprobs import CompletionLogprobs
from compute_node.server.problem import Problem
from compute_node.server.responses import AnswerResponse
from compute_node.server.sampling import MAX_CHOICES, Count, SamplingFields, TokenId
from compute_node.server.service import Service
from compute_node.server.usage import timings_of, usage_of
from compute_node.serving.requests import Done, Event, PromptScores, Request, Token
from compute_node.text.parsers.pieces import Content, Piece, PlainText

__all__ = ["CompletionRequest", "answer_completion"]

_MAX_PROMPT: Final = 1 << 24
_MAX_PROMPTS: Final = 64
_LEAST_DEFAULT: Final = 16
"""Tokens of an answer where neither request nor operator says how many; OpenAI's default for this endpoint."""

Ids = Annotated[list[TokenId], Field(min_length=1, max_length=_MAX_PROMPT, fail_fast=True)]


class CompletionRequest(SamplingFields):
    """The body of a request to /v1/completions."""

    prompt: (
        str
        | Ids
        | Annotated[list[str], Field(min_length=1, max_length=_MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[Ids], Field(min_length=1, max_length=_MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: Count | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = False
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: str | None = None

    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        ids = [one for one in prompt if isinstance(one, int)]
        return [ids] if ids else [one for one in prompt if not isinstance(one, int)]


async def answer_completion(service: Service, body: CompletionRequest) -> AnswerResponse:
    """Continues each prompt.

    Raises:
        Problem: the request cannot be served.
        TierdError: the same, from the engine or the text side.
    """
    service.check_model(body.model)
    if body.suffix:
        raise Problem(400, "suffix is not supported: the model continues texts", param="suffix")
    if body.best_of is not None and body.best_of != body.choices:
        raise Problem(400, "best_of is not supported beyond n", param="best_of")
    prompts = body.prompts()
    if len(prompts) * body.choices > _MAX_PROMPTS:
        raise Problem(400, f"{len(prompts)} prompts of {body.choices} choices are more than {_MAX_PROMPTS}", param="n")
    echo, rules = bool(body.echo), TextRules(service.text_parts(), stops=body.stops, stop_tokens=service.stop_tokens)
    only_echo = body.max_tokens == 0
    if only_echo and not echo:
        raise Problem(400, "max_tokens 0 needs echo", param="max_tokens")
    requests, choices = [], []
    for prompt in prompts:
        tokens = tuple(await service.elsewhere(_tokens, service, prompt))
        asked = _LEAST_DEFAULT if body.max_tokens is None and service.defaults.max_tokens is None else body.max_tokens
        for params in body.params(
            service.defaults,
            max_tokens=asked,
            room=service.room_after(len(tokens)),
            vocabulary=service.vocabulary,
        ):
            requests.append(
                Request(
                    prompt=tokens,
                    params=replace(params, stop=rules.engine_stops),
                    logprobs=body.logprobs,
                    prompt_logprobs=echo and body.logprobs is not None,
                    deadline_seconds=service.defaults.answer_seconds,
                )
            )
            choices.append(_Completion(rules, tokens, echo=echo, logprobs=body.logprobs is not None))
    writer = _CompletionWriter(
        service.name,
        choices,
        per_prompt=body.choices,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )
    return AnswerResponse(Answering(service.engine, service.mailbox, requests), writer, stream=bool(body.stream))


def _tokens(service: Service, prompt: str | list[int]) -> list[int]:
    tokens = service.tokens_of(prompt) if isinstance(prompt, str) else prompt
    if not tokens:
        raise Problem(400, "the prompt has no tokens: give some text to continue", param="prompt")
    if max(tokens) >= service.vocabulary:
        raise Problem(400, f"the prompt has token ids of {service.vocabulary} or more", param="prompt")
    return tokens


class _Completion:
    """One choice: its text, and its log-probabilities where they are wanted."""

    def __init__(self, rules: TextRules, prompt: tuple[int, ...], *, echo: bool, logprobs: bool) -> None:
        self.choice = Choice(rules, PlainText())
        self.text: list[str] = []
        self.logprobs = CompletionLogprobs(rules.tokenizer) if logprobs else None
        self._stop_tokens = rules.stop_tokens
        self._prompt = prompt
        # Special tokens are shown here, as OpenAI's servers do.
        self._echo = b"".join(map(rules.tokenizer.bytes_of, prompt)).decode(errors="replace") if echo else ""

    def begin(self) -> str:
        """The prompt's text, if it is wanted."""
        text, self._echo = self._echo, ""
        if text:
            self.text.append(text)
        return text

    def feed(self, event: Event) -> str:
        """Text that an event adds."""
        pieces: Sequence[Piece] = ()
        if isinstance(event, PromptScores) and self.logprobs is not None:
            self.logprobs.add_prompt(self._prompt, event)
        if isinstance(event, Token):
            if self.logprobs is not None and event.token not in self._stop_tokens:
                self.logprobs.add(event.token, event.logprob, event.top)
            pieces = self.choice.token(event)
        if isinstance(event, Done):
            pieces = self.choice.done(event)
        text = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        self.text.append(text)
        return text


class _CompletionWriter:
    """The answer in OpenAI's form, see `AnswerWriter`."""

    def __init__(self, model: str, choices: Sequence[_Completion], *, per_prompt: int, include_usage: bool) -> None:
        self._choices = choices
        self._per_prompt = per_prompt
        self._include_usage = include_usage
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._echoes = [choice.begin() for choice in choices]

    def begin(self) -> bytes:
        """The prompts, where they are wanted."""
        return b"".join(self._chunk(index, text, None) for index, text in enumerate(self._echoes) if text)

    def feed(self, index: int, event: Event) -> bytes:
        """A chunk, where there is something to say."""
        choice = self._choices[index]
        text = choice.feed(event)
        if isinstance(event, Done):
            return self._chunk(index, text, choice.choice.reason.value, timings=timings_of(event.usage))
        unsent = choice.logprobs is not None and choice.logprobs.unsent
        return self._chunk(index, text, None) if text or unsent else b""

    def stopped(self, index: int) -> bool:
        """Whether a stop string has come."""
        return self._choices[index].choice.stopped

    def end(self) -> bytes:
        """What it took, if that was asked for."""
        last = b""
        if self._include_usage:
            last = event_frame(self._head | {"choices": [], "usage": self._usage()})
        return last + END_OF_STREAM

    def failed(self, problem: Problem) -> bytes:
        """The error as an event; clients raise it."""
        return event_frame(problem.as_object(anthropic=False)) + END_OF_STREAM

    def pulse(self) -> bytes:
        """A comment, which clients skip."""
        return PULSE

    def whole(self) -> object:
        """The completion."""
        choices = [
            {
                "index": index,
                "text": "".join(choice.text),
                "finish_reason": choice.choice.reason.value,
                "logprobs": None if choice.logprobs is None else choice.logprobs.whole(),
            }
            for index, choice in enumerate(self._choices)
        ]
        answer = self._head | {"choices": choices, "usage": self._usage()}
        first = self._choices[0].choice.usage
        return answer if first is None else answer | {"timings": timings_of(first)}

    def _usage(self) -> dict[str, Any]:
        found = [choice.choice.usage for choice in self._choices]
        per = self._per_prompt
        return usage_of(*(found[start : start + per] for start in range(0, len(found), per)))

    def _chunk(self, index: int, text: str, reason: str | None, **more: Any) -> bytes:
        logprobs = self._choices[index].logprobs
        choice = {
            "index": index,
            "text": text,
            "finish_reason": reason,
            "logprobs": None if logprobs is None else logprobs.take(),
        }
        content = self._head | {"choices": [choice]} | more
        if self._include_usage:
            content.setdefault("usage", None)
        return event_frame(content)

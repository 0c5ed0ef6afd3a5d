"""/v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

from compute_node.server.answering import Answering
from compute_node.server.chat_request import ChatRequest
from compute_node.server.choice import Choice
from compute_node.server.logprobs import chat_entry
from compute_node.server.problem import Problem, json_bytes
from compute_node.server.prompting import prepare_chat
from compute_node.server.responses import AnswerResponse
from compute_node.server.service import Service
from compute_node.server.usage import timings_of, usage_of
from compute_node.serving.requests import Done, Event, FinishReason, Token
from compute_node.text.parsers.pieces import Content, MoreArguments, Piece, Reasoning, ToolCall
from compute_node.text.tokenizer import Tokenizer

__all__ = ["END_OF_STREAM", "PULSE", "answer_chat", "event_frame"]

END_OF_STREAM: Final = b"data: [DONE]\n\n"
PULSE: Final = b": still here\n\n"


def event_frame(content: Any) -> bytes:
    """One server-sent event with a JSON value."""
    return b"data: " + json_bytes(content) + b"\n\n"


async def answer_chat(service: Service, body: ChatRequest) -> AnswerResponse:
    """Answers a conversation.

    Raises:
        Problem: the request cannot be served.
        TierdError: the same, from the engine or the text side.
    """
    service.check_model(body.model)
    prepared = await prepare_chat(
        service,
        body,
        body.conversation(),
        max_tokens=body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        one_call=body.parallel_tool_calls is False,
    )
    stream = bool(body.stream)
    writer = _ChatWriter(
        service.name,
        prepared.rules.tokenizer,
        prepared.choices,
        stop_tokens=prepared.rules.stop_tokens,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )
    return AnswerResponse(Answering(service.engine, service.mailbox, prepared.requests), writer, stream=stream)


class _ChatWriter:
    """The answer in OpenAI's form, see `AnswerWriter`."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        choices: Sequence[Choice],
        *,
        stop_tokens: frozenset[int],
        include_usage: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._choices = choices
        self._stop_tokens = stop_tokens
        self._include_usage = include_usage
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._messages = [_Message() for _ in choices]

    def begin(self) -> bytes:
        """Who speaks."""
        frames = [
            self._chunk([{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
            for index in range(len(self._choices))
        ]
        return b"".join(frames)

    def feed(self, index: int, event: Event) -> bytes:
        """A chunk, where there is something to say."""
        choice, message = self._choices[index], self._messages[index]
        if isinstance(event, Token):
            if event.logprob is not None and event.token not in self._stop_tokens:
                message.unsent.append(chat_entry(self._tokenizer, event.token, event.logprob, event.top))
            frames = [self._delta(index, message.add(piece)) for piece in choice.token(event)]
            return b"".join(frames)
        if not isinstance(event, Done):
            return b""
        frames = [self._delta(index, message.add(piece)) for piece in choice.done(event)]
        last = {"index": index, "delta": {}, "finish_reason": self._reason(choice)}
        if message.unsent:
            last["logprobs"] = {"content": message.take_unsent()}
        return b"".join(frames) + self._chunk([last], timings=timings_of(event.usage))

    def stopped(self, index: int) -> bool:
        """A stop string, or the one call that was wanted, has come."""
        return self._choices[index].stopped

    def end(self) -> bytes:
        """What it took, if that was asked for."""
        last = self._chunk([], usage=self._usage()) if self._include_usage else b""
        return last + END_OF_STREAM

    def failed(self, problem: Problem) -> bytes:
        """The error as an event; clients raise it."""
        return event_frame(problem.as_object(anthropic=False)) + END_OF_STREAM

    def pulse(self) -> bytes:
        """A comment, which clients skip."""
        return PULSE

    def whole(self) -> object:
        """The chat completion."""
        choices = []
        for index, (choice, message) in enumerate(zip(self._choices, self._messages, strict=True)):
            found: dict[str, Any] = {
                "index": index,
                "message": message.as_object(),
                "finish_reason": self._reason(choice),
                "logprobs": None,
            }
            if entries := message.sent + message.unsent:
                found["logprobs"] = {"content": entries, "refusal": None}
            choices.append(found)
        answer = self._head | {"object": "chat.completion", "choices": choices, "usage": self._usage()}
        first = self._choices[0].usage
        return answer if first is None else answer | {"timings": timings_of(first)}

    def _usage(self) -> dict[str, Any]:
        return usage_of([choice.usage for choice in self._choices])

    def _reason(self, choice: Choice) -> str:
        if choice.calls and choice.reason is FinishReason.STOP:
            return "tool_calls"
        return choice.reason.value

    def _delta(self, index: int, delta: dict[str, Any]) -> bytes:
        found: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None}
        if self._messages[index].unsent:
            found["logprobs"] = {"content": self._messages[index].take_unsent(), "refusal": None}
        return self._chunk([found])

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        content = self._head | {"object": "chat.completion.chunk", "choices": choices} | more
        if self._include_usage:
            content.setdefault("usage", None)
        return event_frame(content)


class _Message:
    """What one choice has said so far."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.sent: list[dict[str, Any]] = []
        self.unsent: list[dict[str, Any]] = []

    def take_unsent(self) -> list[dict[str, Any]]:
        """Log-probabilities that no chunk has carried yet."""
        found, self.unsent = self.unsent, []
        self.sent += found
        return found

    def add(self, piece: Piece) -> dict[str, Any]:
        """Keeps a piece; returns it as a delta."""
        if isinstance(piece, Content):
            self.content.append(piece.text)
            return {"content": piece.text}
        if isinstance(piece, Reasoning):
            self.reasoning.append(piece.text)
            return {"reasoning_content": piece.text}
        if isinstance(piece, ToolCall):
            function = {"name": piece.name, "arguments": piece.arguments}
            call = {"id": piece.id or f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
            self.calls.append(call)
            return {"tool_calls": [{"index": len(self.calls) - 1} | call | {"function": dict(function)}]}
        assert isinstance(piece, MoreArguments)
        self.calls[-1]["function"]["arguments"] += piece.text
        return {"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": piece.text}}]}

    def as_object(self) -> dict[str, Any]:
        """The whole message."""
        content = "".join(self.content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
            message["content"] = content if content.strip() else None
        return message

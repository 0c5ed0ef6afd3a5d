"""/v1/messages in Anthropic's form, which agents speak."""

from __future__ import annotations

import secrets
from typing import Any, Final

from compute_node.server.answering import Answering
from compute_node.server.choice import Choice
from compute_node.server.messages_request import CountRequest, MessagesRequest
from compute_node.server.problem import Problem, json_bytes
from compute_node.server.prompting import prepare_chat, render_prompt
from compute_node.server.responses import AnswerResponse
from compute_node.server.service import Service
from compute_node.serving.requests import Done, Event, FinishReason, Token, Usage
from compute_node.text.parsers.pieces import Content, MoreArguments, Piece, Reasoning, ToolCall
from compute_node.text.parsers.style import object_of

__all__ = ["answer_message", "count_tokens"]

_DELTAS: Final = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


async def answer_message(service: Service, body: MessagesRequest) -> AnswerResponse:
    """Answers a conversation.

    Raises:
        Problem: the request cannot be served.
        TierdError: the same, from the engine or the text side.
    """
    service.check_model(body.model)
    choice = body.tool_choice
    prepared = await prepare_chat(
        service,
        body.sampling(),
        body.conversation(),
        max_tokens=body.max_tokens,
        one_call=choice is not None and choice.disable_parallel_tool_use,
    )
    writer = _MessageWriter(service.name, prepared.choices[0], prompt_tokens=len(prepared.requests[0].prompt))
    answering = Answering(service.engine, service.mailbox, prepared.requests)
    return AnswerResponse(answering, writer, stream=bool(body.stream))


async def count_tokens(service: Service, body: CountRequest) -> int:
    """Tokens of a conversation's prompt.

    Raises:
        Problem: the request cannot be served.
        TierdError: the same, from the text side.
    """
    service.check_model(body.model)
    _, prompt = await service.elsewhere(render_prompt, service, body.conversation(), most=service.most_counted)
    return len(prompt)


class _MessageWriter:
    """The answer as a message of content blocks, see `AnswerWriter`. A block ends when one of another kind begins."""

    def __init__(self, model: str, choice: Choice, *, prompt_tokens: int) -> None:
        self._model = model
        self._choice = choice
        self._prompt_tokens = prompt_tokens
        self._id = f"msg_{secrets.token_hex(12)}"
        self._blocks: list[dict[str, Any]] = []
        self._open = ""

    def begin(self) -> bytes:
        """The empty message."""
        message = self._message([], None, None, self._usage())
        return _event("message_start", message=message) + self.pulse()

    def feed(self, _index: int, event: Event) -> bytes:
        """Deltas of the block that grows, and the borders of blocks."""
        if isinstance(event, Token):
            return b"".join(self._add(piece) for piece in self._choice.token(event))
        if isinstance(event, Done):
            return b"".join(self._add(piece) for piece in self._choice.done(event))
        return b""

    def stopped(self, _index: int) -> bool:
        """A stop string, or the one call that was wanted, has come."""
        return self._choice.stopped

    def end(self) -> bytes:
        """Why it ended and what it took."""
        reason, stop = self._reason()
        return (
            self._close()
            + _event("message_delta", delta={"stop_reason": reason, "stop_sequence": stop}, usage=self._usage())
            + _event("message_stop")
        )

    def failed(self, problem: Problem) -> bytes:
        """The error as an event; clients raise it."""
        return _event("error", error=problem.as_object(anthropic=True)["error"])

    def pulse(self) -> bytes:
        """An event that clients skip."""
        return _event("ping")

    def whole(self) -> object:
        """The message."""
        blocks = [dict(block) for block in self._blocks]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = object_of(block["input"] or "{}") or {}
            if block["type"] == "thinking":
                block["signature"] = ""
        reason, stop = self._reason()
        return self._message(blocks, reason, stop, self._usage())

    def _message(self, content: list[Any], reason: str | None, stop: str | None, usage: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _usage(self) -> dict[str, int]:
        """Prompt tokens that were computed and those from the cache are told apart."""
        usage = self._choice.usage or Usage(prompt_tokens=self._prompt_tokens)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }

    def _reason(self) -> tuple[str, str | None]:
        choice = self._choice
        if choice.stopped_by is not None:
            return "stop_sequence", choice.stopped_by
        if choice.reason is FinishReason.LENGTH:
            return "max_tokens", None
        return ("tool_use" if choice.calls else "end_turn"), None

    def _add(self, piece: Piece) -> bytes:
        if isinstance(piece, ToolCall):
            call = {"type": "tool_use", "id": piece.id or f"toolu_{secrets.token_hex(12)}", "name": piece.name}
            frames = self._close() + self._start(call | {"input": ""}, call | {"input": {}})
            return frames + (self._arguments(piece.arguments) if piece.arguments else b"")
        if isinstance(piece, MoreArguments):
            return self._arguments(piece.text)
        kind = "text" if isinstance(piece, Content) else "thinking"
        assert isinstance(piece, (Content, Reasoning))
        delta, field = _DELTAS[kind]
        frames = b""
        if self._open != kind:
            empty = {"type": kind, field: ""} | ({"signature": ""} if kind == "thinking" else {})
            frames = self._close() + self._start({"type": kind, field: ""}, empty)
        self._blocks[-1][field] += piece.text
        return frames + self._delta({"type": delta, field: piece.text})

    def _arguments(self, text: str) -> bytes:
        self._blocks[-1]["input"] += text
        return self._delta({"type": "input_json_delta", "partial_json": text})

    def _start(self, kept: dict[str, Any], shown: dict[str, Any]) -> bytes:
        self._blocks.append(kept)
        self._open = kept["type"]
        return _event("content_block_start", index=len(self._blocks) - 1, content_block=shown)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": ""}) if self._open == "thinking" else b""
        self._open = ""
        return signed + _event("content_block_stop", index=len(self._blocks) - 1)


def _event(kind: str, **content: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + json_bytes({"type": kind} | content) + b"\n\n"

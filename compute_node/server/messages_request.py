"""The body of Anthropic's /v1/messages, and the same conversation in the form that chat templates know."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue

from compute_node.server.chat_request import MAX_MESSAGES, MAX_TOOLS, NO_PARAMETERS, Conversation
from compute_node.server.json_body import JsonFields
from compute_node.server.problem import Problem
from compute_node.server.sampling import SamplingFields, Stop
from compute_node.text.parsers.pieces import Tools
from compute_node.text.schema_limits import check_schema

__all__ = ["CountRequest", "MessagesRequest"]


class _Block(JsonFields):
    """A part of a message: text, a tool's use or its result, or thoughts."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(max_length=64)]
    text: str | None = None
    thinking: str | None = None
    id: Annotated[str, Field(max_length=256)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    input: dict[str, JsonValue] | None = None
    tool_use_id: Annotated[str, Field(max_length=256)] | None = None
    content: str | Annotated[list[dict[str, JsonValue]], Field(max_length=1024, fail_fast=True)] | None = None


_Content = str | Annotated[list[_Block], Field(max_length=1024, fail_fast=True)]


class _Message(JsonFields):
    role: Literal["user", "assistant"]
    content: _Content


class _Tool(JsonFields):
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
    description: str | None = None
    input_schema: dict[str, JsonValue] | None = None
    type: Annotated[str, Field(max_length=64)] | None = None


class _ToolChoice(JsonFields):
    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str, Field(max_length=64)] | None = None
    disable_parallel_tool_use: bool = False


class _Thinking(JsonFields):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = None


class CountRequest(JsonFields):
    """The body of a request to /v1/messages/count_tokens, and what /v1/messages shares with it."""

    model: Annotated[str, Field(max_length=256)]
    messages: Annotated[list[_Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: _Content | None = None
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None

    def conversation(self) -> Conversation:
        """What the request says, checked and in the form that templates know.

        Raises:
            Problem: parts that are not supported, or fields that do not go together.
            UsageError: a schema outside its bounds.
        """
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text_of(self.system)})
        for message in self.messages:
            messages += _plain(message)
        tools, forced = self._tools()
        described = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema or NO_PARAMETERS,
                },
            }
            for tool in (self.tools or [] if tools else [])
        ]
        extra = {}
        if self.thinking is not None:
            # The variables by which templates of models that may think or not are told.
            extra = dict.fromkeys(("enable_thinking", "thinking"), self.thinking.type != "disabled")
        return Conversation(
            messages=messages, described=described, tools=tools, forced=forced, schema=None, extra=extra
        )

    def _tools(self) -> tuple[Tools, bool]:
        choice = self.tool_choice
        offered: dict[str, Any] = {}
        for tool in self.tools or []:
            if tool.input_schema is None and tool.type not in {None, "custom"}:
                raise Problem(400, f"the tool {tool.name} of type {tool.type!r} runs at Anthropic's, not here")
            schema = tool.input_schema or NO_PARAMETERS
            offered[tool.name] = check_schema(schema, name=f"the input_schema of the tool {tool.name}")
        if choice is None or choice.type in {"auto", "none"}:
            return ({} if choice is not None and choice.type == "none" else offered), False
        if not offered:
            raise Problem(400, "tool_choice needs tools")
        if choice.type == "tool":
            if choice.name not in offered:
                raise Problem(400, f"tool_choice names {choice.name!r}, which is not among the tools")
            return {choice.name: offered[choice.name]}, True
        return offered, True


class MessagesRequest(CountRequest):
    """The body of a request to /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=1 << 31)]
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 24)] | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=4, fail_fast=True)] | None = None

    def sampling(self) -> SamplingFields:
        """How to generate, in the fields that all requests share."""
        return SamplingFields(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, stop=self.stop_sequences
        )


def _text_of(content: _Content) -> str:
    """The text of a content that holds nothing else."""
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text":
            raise Problem(400, f"a part of type {block.type!r} cannot stand here; this model reads text only")
    return "\n".join(block.text or "" for block in content)


def _plain(message: _Message) -> list[dict[str, Any]]:
    """A message as templates expect it. Results of tools become messages of their own, before the text beside them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    plain: dict[str, Any] = {"role": message.role, "content": ""}
    texts: list[str] = []
    for block in message.content:
        if block.type == "text":
            texts.append(block.text or "")
        elif block.type == "tool_result" and message.role == "user":
            result = {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": _result_text(block.content)}
            results.append(result)
        elif block.type in {"tool_use", "thinking", "redacted_thinking"} and message.role == "assistant":
            _add_own(plain, block)
        else:
            raise Problem(400, f"a message has a part of type {block.type!r}; this model reads text only")
    plain["content"] = "\n".join(texts)
    return results if results and not texts else [*results, plain]


def _add_own(plain: dict[str, Any], block: _Block) -> None:
    """A part that only the assistant's messages have; redacted thoughts cannot be read."""
    if block.type == "tool_use":
        function = {"name": block.name or "", "arguments": block.input or {}}
        plain.setdefault("tool_calls", []).append({"id": block.id or "", "type": "function", "function": function})
    elif block.type == "thinking":
        plain["reasoning_content"] = plain.get("reasoning_content", "") + (block.thinking or "")


def _result_text(content: str | list[dict[str, JsonValue]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.get("type") != "text":
            raise Problem(400, f"a tool's result has a part of type {part.get('type')!r}; this model reads text only")
        text = part.get("text")
        texts.append(text if isinstance(text, str) else json.dumps(text))
    return "\n".join(texts)

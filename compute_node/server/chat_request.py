"""The body of /v1/chat/completions, and the conversation in the form that chat templates know."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, JsonValue

from compute_node.server.json_body import JsonFields
from compute_node.server.problem import Problem
from compute_node.server.sampling import Count, SamplingFields
from compute_node.text.parsers.pieces import Tools
from compute_node.text.parsers.style import object_of
from compute_node.text.schema_limits import check_schema

__all__ = [
    "MAX_MESSAGES",
    "MAX_TOOLS",
    "NO_PARAMETERS",
    "ChatRequest",
    "Conversation",
    "Message",
    "StreamOptions",
    "Tool",
]

MAX_MESSAGES: Final = 4096
MAX_TOOLS: Final = 128
NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
"""Of a tool that takes none."""


class _Part(JsonFields):
    """A part of a message's content; parts other than text are refused."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(max_length=64)]
    text: str | None = None


class _CalledFunction(JsonFields):
    name: Annotated[str, Field(max_length=256)]
    arguments: str | dict[str, JsonValue] = "{}"


class _Call(JsonFields):
    id: Annotated[str, Field(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: _CalledFunction


class Message(JsonFields):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[_Part], Field(max_length=1024, fail_fast=True)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[_Call], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None


class _Function(JsonFields):
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(JsonFields):
    """A function that the model may call."""

    type: Literal["function"] = "function"
    function: _Function


class _NamedFunction(JsonFields):
    name: Annotated[str, Field(max_length=64)]


class _NamedTool(JsonFields):
    type: Literal["function"] = "function"
    function: _NamedFunction


class _NamedSchema(JsonFields):
    model_config = ConfigDict(populate_by_name=True)

    name: Annotated[str, Field(max_length=256)] = "answer"
    described: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None
    strict: bool | None = None


class _ResponseFormat(JsonFields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None


class StreamOptions(JsonFields):
    """What a stream carries besides."""

    include_usage: bool | None = False


class ChatRequest(SamplingFields):
    """The body of a request to /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: _ResponseFormat | None = None
    reasoning_effort: Annotated[str, Field(max_length=16)] | None = None
    chat_template_kwargs: Annotated[dict[str, JsonValue], Field(max_length=32)] | None = None
    functions: JsonValue = None
    function_call: JsonValue = None

    def conversation(self) -> Conversation:
        """What the request says, checked and in the form that templates know.

        Raises:
            Problem: fields that do not go together, or are not supported.
            UsageError: a schema outside its bounds.
        """
        if self.functions is not None or self.function_call is not None:
            raise Problem(400, "functions and function_call are OpenAI's former names: use tools and tool_choice")
        if self.top_logprobs and not self.logprobs:
            raise Problem(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        tools, forced = self._tools()
        extra = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            extra.setdefault("reasoning_effort", self.reasoning_effort)
        return Conversation(
            messages=[_plain(message) for message in self.messages],
            described=[tool.model_dump(exclude_none=True) for tool in self.tools or []] if tools else [],
            tools=tools,
            forced=forced,
            schema=self._schema(),
            extra=extra,
        )

    def _tools(self) -> tuple[Tools, bool]:
        """The tools that may be called, and whether one must be."""
        choice = self.tool_choice
        offered: dict[str, Any] = {}
        for tool in self.tools or []:
            function = tool.function
            offered[function.name] = check_schema(
                function.parameters or NO_PARAMETERS, name=f"the parameters of the tool {function.name}"
            )
        if choice is None or choice == "none" or choice == "auto":  # noqa: PLR1714 - the third kind has no hash
            return ({} if choice == "none" else offered), False
        if not offered:
            raise Problem(400, "tool_choice needs tools", param="tool_choice")
        if isinstance(choice, _NamedTool):
            name = choice.function.name
            if name not in offered:
                raise Problem(400, f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
            return {name: offered[name]}, True
        return offered, True

    def _schema(self) -> dict[str, Any] | None:
        """The JSON schema that the content must follow."""
        form = self.response_format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return {"type": "object"}
        if form.json_schema is None or form.json_schema.described is None:
            raise Problem(400, "response_format json_schema needs json_schema.schema", param="response_format")
        return dict(check_schema(form.json_schema.described, name="response_format.json_schema.schema"))


class Conversation:
    """A request's conversation, ready for the template.

    Attributes:
        messages: role, content and what else templates look at.
        described: the tools as the template shows them.
        tools: those that may be called, by name.
        forced: one of them must be.
        schema: that the content must follow; None: it is free.
        extra: variables for the template.
    """

    def __init__(
        self,
        *,
        messages: list[dict[str, Any]],
        described: list[dict[str, Any]],
        tools: Tools,
        forced: bool,
        schema: dict[str, Any] | None,
        extra: dict[str, Any],
    ) -> None:
        self.messages = messages
        self.described = described
        self.tools = tools
        self.forced = forced
        self.schema = schema
        self.extra = extra


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: content as text, arguments as objects."""
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise Problem(400, f"a message has a part of type {part.type[:64]!r}; this model reads text only")
        content = "".join(part.text or "" for part in content)
    plain: dict[str, Any] = {"role": message.role, "content": content or ""}
    for field in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, field)) is not None:
            plain[field] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _function(call.function)} for call in message.tool_calls
        ]
    return plain


def _function(function: _CalledFunction) -> dict[str, Any]:
    arguments: Any = function.arguments
    if isinstance(arguments, str):
        # Templates write arguments as JSON themselves; text that is no object stays text.
        found = object_of(arguments or "{}")
        arguments = arguments if found is None else found
    return {"name": function.name, "arguments": arguments}

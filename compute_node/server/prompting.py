"""From a conversation to requests of the engine: template, tokens, constraint, and how the answer will be read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compute_node.engine.generate import GenerationParams
from compute_node.server.chat_request import Conversation
from compute_node.server.choice import Choice, TextRules
from compute_node.server.problem import Problem
from compute_node.server.sampling import SamplingFields
from compute_node.server.service import Service
from compute_node.serving.requests import Constraint, Request
from compute_node.text.chat_template import ChatTemplate
from compute_node.text.grammar import CompiledGrammar
from compute_node.text.parsers.forced import forced_schema
from compute_node.text.parsers.tagged import THOUGHT
from compute_node.text.schema_limits import check_schema
from tierd.errors import UsageError

__all__ = ["Prepared", "prepare_chat", "render_prompt"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A chat request that can be submitted.

    Attributes:
        requests: one per choice.
        choices: what reads their events.
        rules: of the text.
    """

    requests: list[Request]
    choices: list[Choice]
    rules: TextRules


def render_prompt(
    service: Service, conversation: Conversation, *, most: int | None = None
) -> tuple[str, tuple[int, ...]]:
    """The prompt as text and as token ids; takes a while for long conversations.

    Args:
        service: with the template and the tokenizer.
        conversation: what was said so far.
        most: a prompt that has surely more tokens is refused before all of it is read; None: the context.

    Raises:
        Problem: the model has no template, or the prompt is far too long.
        UsageError: the template refuses the messages.
    """
    _, template = service.chat_parts()
    messages = [_adapted(message, template) for message in conversation.messages]
    tools = conversation.described or None
    try:
        text = template.render(messages, tools=tools, extra=conversation.extra)
    except UsageError:
        # Some templates write the arguments of former calls as JSON, others expect them to be written already.
        written = [_with_written_arguments(message) for message in messages]
        if written == messages:
            raise
        text = template.render(written, tools=tools, extra=conversation.extra)
    return text, tuple(service.tokens_of(text, special_tokens=False, most=most))


def _adapted(message: dict[str, Any], template: ChatTemplate) -> dict[str, Any]:
    """A message in the words of a template: who speaks, and where thoughts stand."""
    adapted = dict(message)
    if message["role"] == "developer" and "developer" not in template.source:
        adapted["role"] = "system"
    # One that has both thoughts and words beside a call can only show the words.
    if "reasoning_content" in message and not (message.get("tool_calls") and message["content"]):
        adapted["thinking"] = message["reasoning_content"]
    return adapted


def _with_written_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = []
    for call in calls:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        written.append(call | {"function": call["function"] | {"arguments": text}})
    return message | {"tool_calls": written}


async def prepare_chat(
    service: Service,
    fields: SamplingFields,
    conversation: Conversation,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    one_call: bool = False,
) -> Prepared:
    """Everything that a chat request needs before it is submitted.

    Raises:
        Problem: the request cannot be served.
        TierdError: the same, from the text side.
    """
    tokenizer, _ = service.chat_parts()
    form = service.form
    if conversation.tools and not conversation.forced and form.style is None:
        raise Problem(
            400,
            "this model's chat template knows no tools; tool_choice required, or naming a tool, works with any model",
            code="tools_not_supported",
            param="tools",
        )
    text, prompt = await service.elsewhere(render_prompt, service, conversation)
    params = fields.params(
        service.defaults, max_tokens=max_tokens, room=service.room_after(len(prompt)), vocabulary=service.vocabulary
    )
    _check_length(params)
    thinking = form.thinking(text)
    rules = TextRules(
        tokenizer,
        stops=fields.stops,
        markers=form.markers if conversation.tools or form.reasons or form.own_messages else (),
        stop_tokens=frozenset() if fields.ignore_eos else service.stop_tokens,
        one_call=one_call,
    )
    grammar = await _grammar(service, conversation)
    requests = []
    for one in params:
        constraint = None if grammar is None else grammar.begin(after=_end_of_thoughts(service, thinking=thinking))
        requests.append(_request(service, prompt, one, rules, logprobs, constraint))
    parse = conversation.tools if not grammar or conversation.forced else {}
    choices = [
        Choice(rules, form.parser(text, parse, forced=conversation.forced, constrained=grammar is not None))
        for _ in params
    ]
    return Prepared(requests, choices, rules)


def _request(
    service: Service,
    prompt: tuple[int, ...],
    params: GenerationParams,
    rules: TextRules,
    logprobs: int | None,
    constraint: Constraint | None,
) -> Request:
    return Request(
        prompt=prompt,
        params=replace(params, stop=rules.engine_stops),
        logprobs=logprobs,
        constraint=constraint,
        deadline_seconds=service.defaults.answer_seconds,
    )


def _check_length(params: Sequence[GenerationParams]) -> None:
    if params[0].max_tokens < 1:
        raise Problem(400, "an answer has at least one token", param="max_tokens")


async def _grammar(service: Service, conversation: Conversation) -> CompiledGrammar | None:
    schema: Mapping[str, Any] | None = conversation.schema
    if conversation.forced:
        # Each is within the bounds by itself.
        schema = check_schema(forced_schema(conversation.tools), name="the schemas of the tools together")
    if schema is None:
        return None
    if service.grammars is None:
        raise Problem(400, "constrained answers need the model's tokenizer.json, and this store has none")
    return await service.elsewhere(service.grammars.compile, schema)


def _end_of_thoughts(service: Service, *, thinking: bool) -> int | None:
    """The token after which a constraint holds, where the prompt has opened thoughts."""
    return service.text_parts().token_id(THOUGHT) if thinking else None

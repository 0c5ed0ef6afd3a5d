"""What every endpoint works with: the engine, the model's text parts, its names, and the operator's defaults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

from compute_node.server.answering import ServingEngine
from compute_node.server.mailbox import Mailbox
from compute_node.server.metrics import NodeMetrics
from compute_node.server.problem import Problem
from compute_node.server.sampling import Defaults
from compute_node.text.chat_template import ChatTemplate
from compute_node.text.grammar import Grammars
from compute_node.text.parsers.choose import AnswerForm
from compute_node.text.tokenizer import Tokenizer

__all__ = ["Service"]

_MOST_COUNTED: Final = 1 << 16

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A model that is served.

    Attributes:
        engine: generates.
        mailbox: brings its events to the loop.
        metrics: of the node.
        tokenizer: of the store; None: requests name token ids.
        template: of the store; None: there is no chat.
        form: how the model writes thoughts and calls.
        grammars: compiles constraints.
        names: of the model; the first is the one that answers carry.
        context: most tokens of a prompt and its answer.
        vocabulary: number of token ids.
        stop_tokens: end an answer.
        defaults: where a request says nothing.
        started: seconds since the epoch.
        about: facts for people.
    """

    engine: ServingEngine
    mailbox: Mailbox
    metrics: NodeMetrics
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    form: AnswerForm
    grammars: Grammars | None
    names: tuple[str, ...]
    context: int
    vocabulary: int
    stop_tokens: frozenset[int]
    defaults: Defaults
    started: int
    about: dict[str, str]

    @property
    def name(self) -> str:
        """The model's."""
        return self.names[0]

    def check_model(self, asked: str) -> None:
        """Problem if another model is asked for; an empty name is this one."""
        if asked and asked not in self.names:
            raise Problem(
                404,
                f"the model {asked!r} is not served here; this is {' or '.join(map(repr, self.names))}",
                code="model_not_found",
                param="model",
            )

    def text_parts(self) -> Tokenizer:
        """The tokenizer; Problem if the store has none."""
        if self.tokenizer is None:
            raise Problem(400, "this store has no tokenizer.json: give the prompt as token ids to /v1/completions")
        return self.tokenizer

    def chat_parts(self) -> tuple[Tokenizer, ChatTemplate]:
        """Tokenizer and template; Problem if the model is not made for conversations."""
        tokenizer = self.text_parts()
        if self.template is None:
            raise Problem(
                400,
                "this model has no chat template: it was not made for conversations. "
                "Use /v1/completions to let it continue a text.",
                code="no_chat_template",
            )
        return tokenizer, self.template

    @property
    def most_counted(self) -> int:
        """Tokens of a text that is only to be counted, or shown as tokens: a second or two of a core."""
        return max(self.context, _MOST_COUNTED)

    async def elsewhere(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        """Runs what may take a while (templates, tokenizer, grammars) beside the loop, a few at a time."""
        return await asyncio.to_thread(function, *args, **kwargs)

    def tokens_of(self, text: str, *, special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Token ids of a text; takes a while for a long one.

        Args:
            text: a prompt, or anything else.
            special_tokens: as `Tokenizer.encode` has it.
            most: a text that has surely more tokens is refused before all of it is read; None: the context.

        Raises:
            Problem: it is too long.
            UsageError: it holds a lone surrogate.
        """
        tokenizer, most = self.text_parts(), self.context if most is None else most
        if tokenizer.surely_longer(text, most):
            raise _too_long(f"more than {most}", self.context)
        return tokenizer.encode(text, special_tokens=special_tokens)

    def room_after(self, prompt: int) -> int:
        """Tokens that fit after a prompt.

        Raises:
            Problem: the prompt alone does not fit.
        """
        if prompt >= self.context:
            raise _too_long(str(prompt), self.context)
        return self.context - prompt


def _too_long(tokens: str, context: int) -> Problem:
    return Problem(
        400,
        f"the prompt has {tokens} tokens, and the context of this model is {context} tokens: "
        "shorten the conversation, or start the server with a larger --context",
        code="context_length_exceeded",
    )

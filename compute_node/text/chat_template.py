"""Chat templates: Jinja as Hugging Face's tokenizers run it, in a sandbox, since a template is somebody else's code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError

from compute_node.text.bounded_jinja import MAX_TEXT, BoundedEnvironment
from tierd.client.source import StoreView
from tierd.errors import UsageError

__all__ = ["ChatTemplate"]

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MOST_BETWEEN = 64
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", *_SPECIAL})


class ChatTemplate:
    """Renders messages into the prompt that a model was trained on.

    Args:
        source: Jinja source.
        special_tokens: texts of `bos_token`, `eos_token` and so on, as templates name them.
        now: clock for templates that print the date.

    Attributes:
        source: as given.

    Raises:
        UsageError: the template does not compile.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, now: Callable[[], datetime] | None = None
    ) -> None:
        clock = now or (lambda: datetime.now().astimezone())
        self.source = source
        self._environment = environment = BoundedEnvironment()
        environment.filters["tojson"] = environment.bounded(_to_json)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except (TemplateError, SyntaxError, RecursionError, ValueError) as error:
            raise UsageError(f"the chat template does not compile: {error}") from None

    @classmethod
    def from_store(cls, store: StoreView) -> ChatTemplate | None:
        """The template of a store, from chat_template.jinja or tokenizer_config.json; None if it has none.

        Raises:
            UsageError: tokenizer_config.json is not what it should be, or the template does not compile.
        """
        names = {file.name for file in store.manifest.files}
        config: dict[str, Any] = {}
        if "tokenizer_config.json" in names:
            try:
                config = json.loads(store.read_file("tokenizer_config.json"))
            except (ValueError, RecursionError) as error:
                raise UsageError(f"tokenizer_config.json is not JSON: {error}") from None
            if not isinstance(config, dict):
                raise UsageError("tokenizer_config.json is not a JSON object")
        if "chat_template.jinja" in names:
            source: Any = store.read_file("chat_template.jinja").decode(errors="replace")
        else:
            source = _default_of(config.get("chat_template"))
        if not isinstance(source, str):
            return None
        special = {name: text for name in _SPECIAL if (text := _token_text(config.get(name))) is not None}
        return cls(source, special)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages: `{"role": …, "content": …}` each, oldest first.
            add_generation_prompt: end with what begins the assistant's answer.
            tools: functions that may be called, in OpenAI's form; None: there are none.
            extra: further variables that this template knows, such as `enable_thinking`.

        Raises:
            UsageError: the template refuses these messages (its own message is passed on), fails, or goes beyond the
                bounds of `bounded_jinja`; or `extra` takes a name that is taken.
        """
        if taken := _RESERVED & set(extra or {}):
            raise UsageError(f"the chat template's variable {min(taken)!r} is not for the caller to set")
        parts: list[str] = []
        length = 0
        try:
            with self._environment.counting():
                for part in self._template.generate(
                    messages=[dict(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    tools=None if tools is None else [dict(tool) for tool in tools],
                    documents=None,
                    **self._special_tokens,
                    **(extra or {}),
                ):
                    parts.append(part)
                    length += len(part)
                    if length > MAX_TEXT:
                        raise UsageError(f"the chat template makes a prompt of more than {MAX_TEXT} characters")
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise UsageError(f"the chat template refuses these messages: {error}") from None
        except (RecursionError, MemoryError, ArithmeticError, AssertionError) as error:
            raise UsageError(f"the chat template fails: {type(error).__name__}") from None
        return "".join(parts)


def _default_of(template: Any) -> Any:
    """Older configs hold a list of named templates; the one called "default" is meant for plain chat."""
    if not isinstance(template, list):
        return template
    named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
    return named.get("default")


def _token_text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, *, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """Unlike Jinja's own filter this one does not escape HTML, which is what models were trained on."""
    if any(len(str(text)) > _MOST_BETWEEN for text in (indent, *(options.get("separators") or ()))) or (
        isinstance(indent, int) and indent > _MOST_BETWEEN
    ):
        raise TemplateError(f"it writes JSON with more than {_MOST_BETWEEN} characters between the values")
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)

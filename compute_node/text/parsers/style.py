"""How a family writes tool calls: markers around a block, and what the block says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compute_node.text.parsers.pieces import ToolCall, Tools

__all__ = ["Style", "arguments_text", "between", "object_of", "typed_value"]


@dataclass(frozen=True, slots=True)
class Style:
    """One way of writing tool calls.

    Attributes:
        name: for people.
        begin: opens a block of calls.
        end: closes it; empty: the end of the answer does.
        read: the calls of a block's inside; None if it cannot be read.
        inner: further markers inside a block, which may be special tokens of the vocabulary.
        bare: opens a call that stands without the markers, and belongs to it: models forget them. It is a call only if
            its tool is offered.
        bare_end: closes such a call, and belongs to it.
    """

    name: str
    begin: str
    end: str
    read: Callable[[str, Tools], Sequence[ToolCall] | None]
    inner: tuple[str, ...] = ()
    bare: str = ""
    bare_end: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(filter(None, (self.begin, self.end, *self.inner)))


def between(text: str, begin: str, end: str) -> Iterator[str]:
    """What stands between each `begin` and the next `end`, in order; the last end may be missing."""
    place = text.find(begin)
    while place >= 0:
        start = place + len(begin)
        stop = text.find(end, start)
        if stop < 0:
            yield text[start:]
            return
        yield text[start:stop]
        place = text.find(begin, stop + len(end))


def object_of(text: str) -> dict[str, Any] | None:
    """A JSON object; None if the text is not one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def arguments_text(arguments: Any) -> str | None:
    """Arguments as JSON text; None if they are no object."""
    if isinstance(arguments, str):
        arguments = object_of(arguments)
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else None


def typed_value(tools: Tools, tool: str, parameter: str, text: str) -> Any:
    """A parameter that was written without quotes, as its schema says: text where that allows text, else JSON."""
    properties = tools.get(tool, {}).get("properties")
    schema = properties.get(parameter) if isinstance(properties, Mapping) else None
    if _allows_text(schema):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)


def _allows_text(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return True
    if isinstance(options := schema.get("enum"), Sequence):
        return any(isinstance(option, str) for option in options)
    kinds = schema.get("type")
    if kinds is None:
        branches = schema.get("anyOf") or schema.get("oneOf")
        return not isinstance(branches, Sequence) or any(_allows_text(branch) for branch in branches[:32])
    return "string" in ([kinds] if isinstance(kinds, str) else kinds)

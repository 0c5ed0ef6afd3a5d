"""Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`; later models `[TOOL_CALLS]NAME[ARGS]{…}` for each call.

Nothing closes the calls: they go on to the end of the answer.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, Final

from compute_node.text.parsers.pieces import ToolCall, Tools
from compute_node.text.parsers.style import Style, arguments_text

__all__ = ["MISTRAL"]

_BEGIN, _NUMBER, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_LENGTH: Final = 9


def _read(block: str, _tools: Tools) -> Sequence[ToolCall] | None:
    calls: list[ToolCall] = []
    for part in block.split(_BEGIN):
        found = _listed(part) if part.lstrip().startswith("[{") else _named(part)
        if found is None:
            return None
        calls += found
    return calls


def _listed(part: str) -> list[ToolCall] | None:
    """Calls in a list of JSON."""
    try:
        listed = json.loads(part)
    except (ValueError, RecursionError):
        return None
    calls = [_call(one.get("name"), one.get("arguments", {}), one.get("id")) for one in listed if isinstance(one, dict)]
    found = [call for call in calls if call is not None]
    return found if len(found) == len(listed) else None


def _named(part: str) -> list[ToolCall] | None:
    """A name, perhaps the call's own name, and arguments."""
    head, found, written = part.partition(_ARGUMENTS)
    if not found:
        head, found, written = part.partition("{")
        written = found + written
    name, _, number = head.partition(_NUMBER)
    call = _call(name.strip(), written.strip(), number.strip())
    return None if call is None else [call]


def _call(name: Any, arguments: Any, number: Any) -> ToolCall | None:
    written = arguments_text(arguments)
    if written is None or not isinstance(name, str) or not name:
        return None
    # Templates of this style refuse a conversation whose calls have names of another length.
    own = (
        number if isinstance(number, str) and len(number) == _ID_LENGTH else secrets.token_hex(_ID_LENGTH)[:_ID_LENGTH]
    )
    return ToolCall(name, written, own)


MISTRAL: Final = Style("mistral", _BEGIN, "", _read, (_NUMBER, _ARGUMENTS))

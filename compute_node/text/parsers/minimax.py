"""MiniMax M2: `<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>…</invoke>…`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from compute_node.text.parsers.pieces import ToolCall, Tools
from compute_node.text.parsers.style import Style, between, typed_value

__all__ = ["MINIMAX"]


def _read(block: str, tools: Tools) -> Sequence[ToolCall] | None:
    calls = []
    for invoke in between(block, "<invoke name=", "</invoke>"):
        quoted, closed, rest = invoke.partition(">")
        name = quoted.strip().strip("\"'")
        if not closed or not name:
            return None
        arguments = {}
        for parameter in between(rest, "<parameter name=", "</parameter>"):
            quoted_key, _, value = parameter.partition(">")
            key = quoted_key.strip().strip("\"'")
            arguments[key] = typed_value(tools, name, key, value.removeprefix("\n").removesuffix("\n"))
        calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
    return calls or None


MINIMAX: Final = Style("minimax", "<minimax:tool_call>", "</minimax:tool_call>", _read)

"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`.

Where it says something before a call, it often leaves `<tool_call>` out, and closes it nevertheless.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from compute_node.text.parsers.pieces import ToolCall, Tools
from compute_node.text.parsers.style import Style, between, typed_value

__all__ = ["QWEN3_CODER"]


def _read(block: str, tools: Tools) -> Sequence[ToolCall] | None:
    calls = []
    for function in between(block, "<function=", "</function>"):
        name, closed, rest = function.partition(">")
        if not closed or not name.strip():
            return None
        name = name.strip()
        arguments = {}
        for parameter in between(rest, "<parameter=", "</parameter>"):
            key, _, value = parameter.partition(">")
            # One line break belongs to each marker.
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[key.strip()] = typed_value(tools, name, key.strip(), value)
        calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
    return calls or None


QWEN3_CODER: Final = Style(
    "qwen3-coder", "<tool_call>", "</tool_call>", _read, bare="<function=", bare_end="</function>"
)

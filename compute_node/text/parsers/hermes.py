"""Qwen and many others: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one block per call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from compute_node.text.parsers.pieces import ToolCall, Tools
from compute_node.text.parsers.style import Style, arguments_text, object_of

__all__ = ["HERMES"]


def _read(block: str, _tools: Tools) -> Sequence[ToolCall] | None:
    call = object_of(block)
    if call is None or not isinstance(name := call.get("name"), str):
        return None
    arguments = arguments_text(call.get("arguments", call.get("parameters", {})))
    return None if arguments is None else [ToolCall(name, arguments)]


HERMES: Final = Style("hermes", "<tool_call>", "</tool_call>", _read)

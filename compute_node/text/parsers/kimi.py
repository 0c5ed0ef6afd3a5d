"""Kimi K2: a section of calls, each `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from compute_node.text.parsers.pieces import ToolCall, Tools
from compute_node.text.parsers.style import Style, arguments_text, between

__all__ = ["KIMI"]

_CALL, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def _read(block: str, _tools: Tools) -> Sequence[ToolCall] | None:
    calls = []
    for call in between(block, _CALL, _END):
        named, found, written = call.partition(_ARGUMENTS)
        named = named.strip()
        name = named.removeprefix("functions.").rpartition(":")[0] or named
        arguments = arguments_text(written.strip()) if found else None
        if arguments is None or not name:
            return None
        # The template writes these names again, so they are kept.
        calls.append(ToolCall(name, arguments, named))
    return calls or None


KIMI: Final = Style(
    "kimi", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _read, (_CALL, _ARGUMENTS, _END)
)

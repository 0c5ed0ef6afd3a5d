"""GLM 4.5 and later: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from compute_node.text.parsers.pieces import ToolCall, Tools
from compute_node.text.parsers.style import Style, between, typed_value

__all__ = ["GLM"]


def _read(block: str, tools: Tools) -> Sequence[ToolCall] | None:
    name = block.partition("<arg_key>")[0].strip()
    if not name or any(character in name for character in "<>{}\n"):
        return None
    keys = [key.strip() for key in between(block, "<arg_key>", "</arg_key>")]
    values = list(between(block, "<arg_value>", "</arg_value>"))
    if len(keys) != len(values):
        return None
    arguments = {key: typed_value(tools, name, key, value) for key, value in zip(keys, values, strict=True)}
    return [ToolCall(name, json.dumps(arguments, ensure_ascii=False))]


GLM: Final = Style("glm", "<tool_call>", "</tool_call>", _read)

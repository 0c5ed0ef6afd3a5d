"""DeepSeek V3.2 and V4: calls in tags whose names begin with a mark, DSML between two full-width bars, here `|DSML|`.

`<|DSML|function_calls><|DSML|invoke name="NAME"><|DSML|parameter name="KEY" string="true">VALUE</|DSML|parameter>…`, in
V4 with `tool_calls` in the first place: a value is text where `string` is true, else JSON. The releases bring code in
place of a chat template; who writes a template for them names these tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from compute_node.text.parsers.pieces import ToolCall, Tools
from compute_node.text.parsers.style import Style, between, typed_value

__all__ = ["DSML_V4", "DSML_V32", "MARK"]

_BAR: Final = "\uff5c"
MARK: Final = f"{_BAR}DSML{_BAR}"
"""Begins the name of every tag."""

_NAME: Final = re.compile(r'\s*name="([^"]*)"(?:\s+string="(true|false)")?\s*>')


def _read(block: str, tools: Tools) -> Sequence[ToolCall] | None:
    calls = []
    for invoke in between(block, f"<{MARK}invoke", f"</{MARK}invoke>"):
        named = _NAME.match(invoke)
        if named is None or not named[1]:
            return None
        arguments = {}
        for parameter in between(invoke, f"<{MARK}parameter", f"</{MARK}parameter>"):
            key = _NAME.match(parameter)
            if key is None:
                return None
            value = parameter[key.end() :]
            arguments[key[1]] = value if key[2] == "true" else _value(tools, named[1], key[1], value)
        calls.append(ToolCall(named[1], json.dumps(arguments, ensure_ascii=False)))
    return calls or None


def _value(tools: Tools, tool: str, key: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return typed_value(tools, tool, key, text)


DSML_V32: Final = Style("dsml-v3.2", f"<{MARK}function_calls>", f"</{MARK}function_calls>", _read, (MARK,))
DSML_V4: Final = Style("dsml-v4", f"<{MARK}tool_calls>", f"</{MARK}tool_calls>", _read, (MARK,))

"""DeepSeek V3, R1 and V3.1: a section of calls, in special tokens of their own.

V3 and R1 write `function`, a separator, the name, and the arguments in a fenced block; V3.1 writes the name, the
separator and the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from compute_node.text.parsers.pieces import ToolCall, Tools
from compute_node.text.parsers.style import Style, arguments_text, between

__all__ = ["DEEPSEEK"]

# Full-width bars and lower one-eighth blocks, as in the vocabulary.
_BAR, _GAP = "\uff5c", "\u2581"


def _marker(words: str) -> str:
    return f"<{_BAR}{words.replace(' ', _GAP)}{_BAR}>"


_CALL, _SEPARATOR, _END = _marker("tool call begin"), _marker("tool sep"), _marker("tool call end")


def _read(block: str, _tools: Tools) -> Sequence[ToolCall] | None:
    calls = []
    for call in between(block, _CALL, _END):
        first, found, rest = call.partition(_SEPARATOR)
        if not found:
            return None
        name, written = first.strip(), rest
        if name == "function" and "```" in rest:
            name, _, fenced = rest.partition("\n")
            written = fenced.strip().removeprefix("```json").removesuffix("```")
        arguments = arguments_text(written.strip())
        if arguments is None or not name.strip():
            return None
        calls.append(ToolCall(name.strip(), arguments))
    return calls or None


DEEPSEEK: Final = Style(
    "deepseek", _marker("tool calls begin"), _marker("tool calls end"), _read, (_CALL, _SEPARATOR, _END)
)

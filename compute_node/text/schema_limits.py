"""What a client's JSON schema may be: it is compiled into a grammar here, so its size is the client's to choose.

Nothing outside the schema is ever fetched: references lead into the schema itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from tierd.errors import LimitExceeded, UsageError

__all__ = ["check_schema"]

MAX_BYTES: Final = 64 << 10
MAX_DEPTH: Final = 32
MAX_PARTS: Final = 4096
MAX_PATTERN: Final = 512
MAX_COUNT: Final = 4096
MAX_COMBINED: Final = 8
"""Patterns and the like of a schema that demands several of them of one text: every further one doubles the work."""

_COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_EXPRESSIONS: Final = ("pattern", "format", "multipleOf")
_REMARKS: Final = frozenset(
    {"$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated"}
)
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")


def check_schema(schema: Any, *, name: str) -> Mapping[str, Any]:
    """The schema, if it is within its bounds.

    Args:
        schema: JSON value.
        name: of the field that holds it, for messages.

    Raises:
        UsageError: it is no object, or refers to something outside itself.
        LimitExceeded: it is too large, too deep, or asks for too much.
    """
    if not isinstance(schema, Mapping):
        raise UsageError(f"{name} is not a JSON object")
    # An iterative walk, and before anything that recurses.
    left: list[tuple[Any, int]] = [(schema, 1)]
    parts = expressions = 0
    combines = False
    while left:
        part, depth = left.pop()
        parts += 1
        if depth > MAX_DEPTH:
            raise LimitExceeded(f"{name} is nested deeper than {MAX_DEPTH} levels")
        if parts > MAX_PARTS:
            raise LimitExceeded(f"{name} has more than {MAX_PARTS} parts")
        if isinstance(part, Mapping):
            _check_object(part, name)
            expressions += sum(isinstance(part.get(key), (str, int, float)) for key in _EXPRESSIONS)
            combines = combines or _combines(part)
            left += [(value, depth + 1) for value in part.values()]
        elif isinstance(part, list):
            left += [(value, depth + 1) for value in part]
    if combines and expressions > MAX_COMBINED:
        raise LimitExceeded(
            f"{name} has {expressions} patterns, formats and the like, more than {MAX_COMBINED}",
            hint="So many are possible without allOf, and without other keys beside $ref.",
        )
    size = len(json.dumps(schema))
    if size > MAX_BYTES:
        raise LimitExceeded(f"{name} has {size} bytes, more than {MAX_BYTES}")
    return schema


def _combines(part: Mapping[str, Any]) -> bool:
    """Whether one text has to follow several parts of the schema."""
    branches = part.get("allOf")
    if isinstance(branches, list) and (len(branches) > 1 or not part.keys() - {"allOf"} <= _REMARKS):
        return True
    return any(key in part for key in _REFERENCES) and not part.keys() - set(_REFERENCES) <= _REMARKS


def _check_object(part: Mapping[str, Any], name: str) -> None:
    for key in _REFERENCES:
        target = part.get(key)
        if isinstance(target, str) and not target.startswith("#"):
            raise UsageError(
                f"{name}: {key} {target[:80]!r} leads outside the schema",
                hint="Only #/… is followed; nothing is fetched.",
            )
    pattern = part.get("pattern")
    if isinstance(pattern, str) and len(pattern) > MAX_PATTERN:
        raise LimitExceeded(f"{name}: a pattern of {len(pattern)} characters is longer than {MAX_PATTERN}")
    for key in _COUNTS:
        count = part.get(key)
        if isinstance(count, (int, float)) and count > MAX_COUNT:
            raise LimitExceeded(f"{name}: {key} {count} is more than {MAX_COUNT}")

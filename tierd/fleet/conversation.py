"""Which conversation a request belongs to, and in which order its nodes are asked: pure functions of the request.

So every replica of the entrance sends a conversation the same way, without a word between them and after a restart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tierd.store.checksums import xxh3

__all__ = ["CONVERSATION_HEADER", "conversation_key", "rank_nodes"]

CONVERSATION_HEADER: Final = "x-conversation-id"
"""A client that names its conversation itself sends it so."""

_NAMED: Final = ("conversation", "prompt_cache_key", "session_id")
_MAX_NAME: Final = 512
_PROMPT_CHARACTERS: Final = 256
_PROMPT_TOKENS: Final = 64


def conversation_key(headers: Mapping[str, str], body: bytes) -> int:
    """A number that is the same for all requests of a conversation, and nearly always another for others.

    What names it, the first of these: the header `x-conversation-id`; `conversation`, `prompt_cache_key` or
    `session_id` in the body; of a chat everything up to the first message that is not the system's; of a prompt its
    first 256 characters or 64 tokens; the body.

    Args:
        headers: of the request, names in lower case.
        body: as it came.
    """
    named = headers.get(CONVERSATION_HEADER, "")
    facts = ["named", named[:_MAX_NAME]] if named else _facts(_parsed(body))
    return xxh3(json.dumps(facts, sort_keys=True).encode() if facts else body)


def rank_nodes(key: int, names: Iterable[str]) -> list[str]:
    """All nodes, the conversation's own first; when one goes, only its conversations move.

    Thaler and Ravishankar, IEEE/ACM Transactions on Networking 6(1), 1998.
    """
    return sorted(names, key=lambda name: (xxh3(f"{key:016x}/{name}".encode()), name), reverse=True)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return {}
    return request if isinstance(request, dict) else {}


def _facts(request: dict[str, Any]) -> list[Any] | None:
    """What in a request tells its conversation; None: nothing does."""
    for field in _NAMED:
        value = request.get(field)
        if isinstance(value, str) and value:
            return ["named", value[:_MAX_NAME]]
    messages, prompt = request.get("messages"), request.get("prompt")
    if isinstance(messages, list) and messages:
        return ["chat", request.get("system"), *_beginning(messages)]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str | list):
        return ["prompt", prompt[: _PROMPT_CHARACTERS if isinstance(prompt, str) else _PROMPT_TOKENS]]
    return None


def _beginning(messages: list[Any]) -> list[Any]:
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            return messages[: place + 1]
    return messages

"""A conversation in a file: its messages, and beside it what the KV cache holds of them.

The messages are JSON, so that people can read them; they are written after every answer. The rows of the KV cache are
written at the end, and only save time: without them the conversation is computed again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tierd.errors import UsageError

__all__ = ["SavedConversation", "SessionFile"]

_VERSION: Final = 1
_MAX_BYTES: Final = 64 << 20
_ROLES: Final = frozenset({"system", "user", "assistant"})


@dataclass(frozen=True, slots=True)
class SavedConversation:
    """What a file holds.

    Attributes:
        messages: role and content of each, oldest first.
        saved: when, in UTC.
    """

    messages: list[dict[str, str]]
    saved: str


class SessionFile:
    """The file of one conversation with one model.

    Args:
        path: of the messages; the rows are beside it.
        fingerprint: of the model's store; another model's conversation is refused.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self.rows_path = path.parent / f"{path.name}.kv"
        self._fingerprint = fingerprint

    def load(self) -> SavedConversation | None:
        """The conversation; None if there is no file yet.

        Raises:
            UsageError: it is no such file, or was held with another model.
        """
        try:
            with self.path.open("rb") as file:
                content: Any = json.loads(file.read(_MAX_BYTES + 1))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"--session {self.path} cannot be read as a conversation: {error}") from None
        if not isinstance(content, dict) or content.get("version") != _VERSION:
            raise UsageError(f"--session {self.path} is no conversation that this version knows")
        if content.get("fingerprint") != self._fingerprint:
            raise UsageError(
                f"--session {self.path} was held with another model (fingerprint "
                f"{str(content.get('fingerprint'))[:16]}…, this one is {self._fingerprint[:16]}…)",
                hint="Name another file, or the store that it was held with.",
            )
        messages = content.get("messages")
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise UsageError(f"--session {self.path} holds messages that are none")
        return SavedConversation(messages, str(content.get("saved", "")))

    def save(self, messages: Sequence[dict[str, str]]) -> None:
        """Writes the messages; the file is there as a whole or as it was before.

        Raises:
            UsageError: it cannot be written.
        """
        content = {
            "version": _VERSION,
            "fingerprint": self._fingerprint,
            "saved": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "messages": list(messages),
        }
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            try:
                with temporary.open("w", encoding="utf-8") as file:
                    os.fchmod(file.fileno(), 0o600)
                    json.dump(content, file, ensure_ascii=False, indent=1)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self.path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"--session {self.path} cannot be written: {error.strerror}") from None


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and set(message) == {"role", "content"}
        and all(isinstance(text, str) for text in message.values())
        and message["role"] in _ROLES
    )

"""Who may call: the token that every call of another host has to show."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import structlog

from tierd.access import TOKEN_HEADER, read_tokens
from tierd.errors import AccessDenied, UsageError

__all__ = ["OPEN_DOOR", "Door"]

_log = structlog.get_logger()
_SCHEME = "Bearer "


class _Call(Protocol):
    def peer(self) -> str: ...

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


class Door:
    """Admits calls that show one of the tokens of a file; each handler asks it first.

    The file may hold several tokens, so that they can be changed one after the other, and is read again when it has
    changed. While it cannot be read, the last tokens hold.

    Args:
        token_file: the file; None admits everybody.

    Raises:
        UsageError: the file cannot be used.
    """

    def __init__(self, token_file: Path | None) -> None:
        self._file = token_file
        self._stamp: tuple[int, int] | None = None
        self._digests: list[bytes] = []
        if token_file is not None:
            self._stamp = _stamp(token_file)
            self._digests = _digests(token_file)

    def check(self, call: _Call) -> None:
        """Return if the call may come in; whoever can reach the daemon's own Unix socket may.

        Raises:
            AccessDenied: it shows no token, or a wrong one.
        """
        if self._file is None or call.peer().startswith("unix:"):
            return
        self._read_again(self._file)
        shown = _shown(call)
        if shown is None:
            raise AccessDenied("no token was shown", hint="Nodes name it with --token-file FILE.")
        digest, found = hashlib.sha256(shown).digest(), False
        for known in self._digests:  # all of them: the time tells nothing
            found |= hmac.compare_digest(digest, known)
        if not found:
            raise AccessDenied("the token is not one of those that are admitted")

    def _read_again(self, file: Path) -> None:
        stamp = _stamp(file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._digests = _digests(file)
        except UsageError as error:
            _log.warning("tokens were not read again; the last ones hold", why=error.message)
        else:
            _log.info("tokens were read again", file=str(file), tokens=len(self._digests))


OPEN_DOOR = Door(None)
"""For sockets of this host."""


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        facts = file.stat()
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size


def _digests(file: Path) -> list[bytes]:
    return [hashlib.sha256(token.encode()).digest() for token in read_tokens(file)]


def _shown(call: _Call) -> bytes | None:
    for name, value in call.invocation_metadata() or ():
        if name == TOKEN_HEADER and isinstance(value, str) and value.startswith(_SCHEME):
            return value[len(_SCHEME) :].encode()
    return None

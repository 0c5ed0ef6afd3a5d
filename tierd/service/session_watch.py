"""Who may look on while sessions talk with the broker; called on the loop, must not call back."""

from __future__ import annotations

from typing import Protocol

from tierd.requests import AcquireRequest, Granted, Refused

__all__ = ["SessionWatch", "Unwatched"]


class SessionWatch(Protocol):
    """Takes note of what sessions do."""

    def opened(self, session_id: int, name: str) -> None:
        """A node was admitted; `name` is its own, for people."""

    def asked(self, session_id: int, request: AcquireRequest) -> None:
        """A request came; it may still be refused as senseless, which ends the session."""

    def answered(self, session_id: int, acquire_id: int, granted: list[Granted], refused: list[Refused]) -> None:
        """Some experts of a request are decided."""

    def hinted(self, session_id: int, layer: int, experts: int) -> None:
        """The session named so many experts of a layer that it may want soon."""

    def closed(self, session_id: int, why: str) -> None:
        """The session is over."""


class Unwatched:
    """Nobody looks."""

    def opened(self, session_id: int, name: str) -> None:
        """Nothing."""

    def asked(self, session_id: int, request: AcquireRequest) -> None:
        """Nothing."""

    def answered(self, session_id: int, acquire_id: int, granted: list[Granted], refused: list[Refused]) -> None:
        """Nothing."""

    def hinted(self, session_id: int, layer: int, experts: int) -> None:
        """Nothing."""

    def closed(self, session_id: int, why: str) -> None:
        """Nothing."""

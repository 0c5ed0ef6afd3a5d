"""Every error that tierd raises on purpose, as one small tree.

A message says what was wrong and where (file, drive, expert, offset, option); `hint` says what to do about it.
Commands print both and leave with `exit_code`: 1 a problem was found, 2 wrong use or refused input.
"""

from __future__ import annotations

__all__ = [
    "AccessDenied",
    "ArenaError",
    "ChecksumMismatch",
    "DaemonUnavailable",
    "DataLoss",
    "DeadlineExceeded",
    "DriveError",
    "LimitExceeded",
    "SessionRefused",
    "StoreDamaged",
    "TierdError",
    "UnsupportedModel",
    "UsageError",
]


class TierdError(Exception):
    """Base of all errors raised on purpose; `hint` is the advice printed under the message."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class UsageError(TierdError):
    """A wrong option, or input that is refused."""

    exit_code = 2


class UnsupportedModel(UsageError):
    """A checkpoint whose family or configuration is not known; never guessed."""


class LimitExceeded(UsageError):
    """A size, count or id outside the stated limits."""


class SessionRefused(UsageError):
    """Daemon and node do not serve the same store, numerics or protocol version."""


class AccessDenied(UsageError):
    """A peer that did not show the token or certificate that is asked for."""


class StoreDamaged(TierdError):
    """A store or checkpoint file is truncated, overlapping, inconsistent or missing."""


class DriveError(TierdError):
    """A read failed; carries what an operator needs to find the drive."""

    def __init__(
        self, message: str, *, path: str = "", offset: int = 0, length: int = 0, errno: int = 0, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.path = path
        self.offset = offset
        self.length = length
        self.errno = errno


class ChecksumMismatch(DriveError):
    """The bytes of a record or tensor are not the ones that were converted."""


class DataLoss(DriveError):
    """No good copy of a record could be read from any drive."""


class ArenaError(TierdError):
    """Shared memory could not be made, attached or resized."""


class DeadlineExceeded(TierdError):
    """An answer did not come within its bound."""


class DaemonUnavailable(TierdError):
    """The daemon is gone, refused the connection or is shutting down."""

"""What a failed read means: which kind it is, whether trying again may help, and what to say when no copy is good."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from tierd.errors import ChecksumMismatch, DataLoss, DriveError

if TYPE_CHECKING:
    from tierd.devices.device import RecordRead

__all__ = [
    "ERROR_KINDS",
    "MAX_RETRIES",
    "blames_drive",
    "blames_record",
    "error_kind",
    "is_transient",
    "retry_delay",
    "verdict",
]

ERROR_KINDS: Final = ("checksum", "short", "vanished", "io", "refused", "cancelled")
"""Every value of `error_kind`: the values of a metrics label."""

MAX_RETRIES: Final = 3
"""Attempts on a drive that has failed already, per read."""
_FIRST_DELAY: Final = 0.01

_TRANSIENT: Final = frozenset({errno.EIO, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT, errno.EREMOTEIO})
_VANISHED: Final = frozenset({errno.ENODEV, errno.ENXIO, errno.ENOENT, errno.ESTALE, errno.ENOTCONN, errno.EBADF})


def error_kind(error: DriveError) -> str:
    """One of `ERROR_KINDS`."""
    if isinstance(error, ChecksumMismatch):
        return "checksum"
    if error.errno == 0:
        return "short"
    if error.errno in _VANISHED:
        return "vanished"
    return {errno.EINVAL: "refused", errno.ECANCELED: "cancelled"}.get(error.errno, "io")


def is_transient(error: DriveError) -> bool:
    """Whether the same read on the same drive may well succeed a moment later."""
    return error_kind(error) == "io" and error.errno in _TRANSIENT


def blames_record(error: DriveError) -> bool:
    """Whether these very bytes are bad or missing, so that asking this drive for them again is of no use."""
    return error_kind(error) in ("checksum", "short")


def blames_drive(error: DriveError) -> bool:
    """Whether the failure says something about the drive; a request that made no sense, or a closing, does not."""
    return error_kind(error) not in ("refused", "cancelled")


def retry_delay(retry: int) -> float:
    """Seconds before a retry, counted from 0."""
    return float(_FIRST_DELAY * 4**retry)


def verdict(read: RecordRead, errors: Mapping[str, DriveError]) -> DriveError:
    """The one error that the caller gets when every drive failed.

    Args:
        read: what was wanted.
        errors: the last error of each drive that was tried, in the order of trying.

    Returns:
        DataLoss if no drive has good bytes, else DriveError: then a later attempt may succeed. It carries the path,
        offset, length and errno of one failure, one that may pass first.
    """
    lost = all(blames_record(error) for error in errors.values())
    first = next((error for error in errors.values() if not blames_record(error)), next(iter(errors.values())))
    subject = f"layer {read.layer}, expert {read.index}"
    reasons = "; ".join(error.message for error in errors.values())
    tried = ", ".join(errors)
    if lost:
        message = f"{subject}: no good copy on any drive (tried {tried}): {reasons}"
        hint = "Run `tierd verify` on the store and its mirrors; restore the file named here, or convert again."
    else:
        message = f"{subject}: not readable now (tried {tried}): {reasons}"
        hint = first.hint or "If only this file fails, its drive is failing; if all do, look at the mount."
    return (DataLoss if lost else DriveError)(
        message, path=first.path, offset=read.offset, length=read.nbytes, errno=first.errno, hint=hint
    )

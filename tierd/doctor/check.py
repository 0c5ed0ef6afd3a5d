"""One thing that the doctor looked at, and the sum of all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Check", "Status", "summary", "worst"]


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    REMARK = "remark"
    """Works, but slower or with less safety than it could."""
    PROBLEM = "problem"
    """Does not work, or not for long."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at, in few words.
        status: how it is.
        detail: what was found, with figures.
        remedy: what to do about it; empty where nothing is to be done.
        where: directory that it is about; empty for the host.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""
    where: str = ""

    def to_table(self) -> dict[str, Any]:
        """The finding for machines."""
        return asdict(self) | {"status": self.status.value}


def worst(checks: Iterable[Check]) -> Status:
    """The status that decides."""
    found = {check.status for check in checks}
    return next((status for status in (Status.PROBLEM, Status.REMARK) if status in found), Status.OK)


def summary(checks: Iterable[Check]) -> str:
    """`ok`, `remarks` or `problems`."""
    status = worst(checks)
    return "ok" if status is Status.OK else f"{status}s"

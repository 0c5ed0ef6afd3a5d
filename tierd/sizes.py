"""Amounts as people write and read them: `96GiB`, `3.6 MB`, `25%`, `1 layer`."""

from __future__ import annotations

import re

from tierd.errors import UsageError

__all__ = [
    "format_bytes",
    "format_count",
    "format_duration",
    "format_problems",
    "format_share",
    "parse_bytes",
    "parse_share",
]

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_MAX_BYTES = 1 << 56


def parse_bytes(text: str, *, option: str) -> int:
    """Bytes from a number with a unit: powers of 1000 (`MB`) or of 1024 (`MiB`); a bare number is bytes.

    Raises:
        UsageError: naming `option`, if the text is no such amount.
    """
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f"{option}: {text!r} is not an amount of memory", hint="Write it like 96GiB, 512MB or 25%.")
    amount = int(float(match[1]) * _UNITS[match[2].upper()])
    if not 0 < amount <= _MAX_BYTES:
        raise UsageError(f"{option}: {text} is outside 1 byte to {format_bytes(_MAX_BYTES)}")
    return amount


def parse_share(text: str, *, whole: int, option: str) -> int:
    """Bytes from an amount or from a percentage of `whole` bytes.

    Raises:
        UsageError: naming `option`, if the text is neither, or a percentage outside 0 (exclusive) to 100.
    """
    stripped = text.strip()
    if not stripped.endswith("%"):
        return parse_bytes(text, option=option)
    try:
        percent = float(stripped[:-1])
    except ValueError:
        percent = -1.0
    if not 0 < percent <= 100:
        raise UsageError(f"{option}: {text!r} is not a percentage between 0 and 100")
    return max(1, int(whole * percent / 100))


def format_bytes(count: float) -> str:
    """`3.6 MB`: three significant digits in powers of 1000, as drives and networks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 99.5 else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if abs(count) < 99.5 else f"{count:.0f} TB"


def format_duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 5 min`, `4 d 2 h`: as exact as people care at that age."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days:,} d {hours} h"


def format_count(count: int, noun: str) -> str:
    """`1 layer`, `1,024 layers`: for nouns with a plural in `s`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_problems(count: int) -> str:
    """`ok`, or `1 problem`, or `2 problems`."""
    return format_count(count, "problem") if count else "ok"


def format_share(share: float, *, digits: int = 0) -> str:
    """`44 %` of a share of 0.44."""
    return f"{100 * share:.{digits}f} %"

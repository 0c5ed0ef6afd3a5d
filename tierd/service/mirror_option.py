"""`--mirror DIR[=WEIGHT]`, taken apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from tierd.errors import UsageError

__all__ = ["Mirror", "parse_mirror"]


class Mirror(NamedTuple):
    """A directory with copies of shards, and how much of its measured bandwidth to count on."""

    directory: Path
    weight: float = 1.0


def parse_mirror(text: str) -> Mirror:
    """A directory, or a directory and a weight after the last `=`.

    Raises:
        UsageError: no directory, or a weight that is not a positive number. A directory whose name ends in `=` and a
            number can be given with a weight behind it.
    """
    name, sign, weight = text.rpartition("=")
    try:
        value = float(weight) if sign else 1.0
    except ValueError:
        name, value = text, 1.0
    if not sign:
        name = text
    if not name:
        raise UsageError(f"--mirror {text!r} names no directory", hint="Write --mirror DIR or --mirror DIR=WEIGHT.")
    if not (0 < value < math.inf):
        raise UsageError(
            f"--mirror {text!r}: the weight must be a positive number",
            hint="The weight says how much of the drive's measured bandwidth to count on; 1 is all of it.",
        )
    return Mirror(Path(name).expanduser().absolute(), value)

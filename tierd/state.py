"""Where tierd keeps what it learned between runs, and what it can fetch again."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_directory", "state_directory"]


def state_directory() -> Path:
    """`$XDG_STATE_HOME/tierd`, `~/.local/state/tierd` by default (XDG Base Directory Specification); not made here."""
    base = os.environ.get("XDG_STATE_HOME")
    return Path(base) / "tierd" if base else Path("~/.local/state/tierd").expanduser()


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/tierd`, `~/.cache/tierd` by default (XDG Base Directory Specification); not made here."""
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "tierd" if base else Path("~/.cache/tierd").expanduser()

"""Optional packages: what to type where one is missing."""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["install_hint"]


def install_hint(extra: str) -> str:
    """The command that installs an extra where this Python runs, as advice for people.

    Args:
        extra: its name in pyproject.toml.
    """
    folder, editable = _origin()
    what = shlex.quote(f"{folder or 'tierd'}[{extra}]")
    return f"Install the extra: {shlex.quote(sys.executable)} -m pip install {'-e ' if editable else ''}{what}"


def _origin() -> tuple[Path | None, bool]:
    """The folder that this package was installed from, if it is still there, and whether its code is used in place."""
    # Run within its own folder, Python finds that folder's metadata first, which say nothing of an installation.
    for found in distributions(name="tierd"):
        try:
            content = json.loads(found.read_text("direct_url.json") or "{}")
            place = urlsplit(content["url"])
        except (ValueError, KeyError):
            continue
        folder = Path(unquote(place.path))
        if place.scheme == "file" and (folder / "pyproject.toml").is_file():
            return folder, bool(content.get("dir_info", {}).get("editable"))
    return None, False

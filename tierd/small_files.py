"""Files that people name and that should be small: settings, tokens, certificates, lists."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["read_at_most"]


def read_at_most(path: Path, limit: int) -> bytes:
    """All bytes of a file; OSError (EFBIG) if there are more than `limit`.

    It counts what comes, because devices and pipes do not say their size.
    """
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"{os.strerror(errno.EFBIG)}, more than {limit} bytes", str(path))
    return data

"""What the KV cache holds of a conversation, in a file: one that is opened again need not be computed again.

The rows are the very bits that computing would give, as long as weights, numerics and machine code are the same: the
file says whose they are, and is only read for the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from compute_node.engine.kv_cache import KVCache, Sequence
from compute_node.engine.saved_sequence import restore_sequence, save_sequence
from tierd.array_files import read_arrays
from tierd.errors import TierdError

__all__ = ["load_warm", "save_warm"]

_FACTS: Final = "facts"
_MOST_FACTS: Final = 256 << 20


def save_warm(path: Path, cache: KVCache, sequence: Sequence, facts: Mapping[str, Any]) -> None:
    """Writes a sequence's part of the cache; the file is there as a whole or not at all.

    Args:
        path: of the file.
        cache: that holds the sequence.
        sequence: what is saved.
        facts: by which the file will be known again; JSON.

    Raises:
        OSError: it cannot be written.
    """
    described = json.dumps(dict(facts) | {"tokens": sequence.tokens}).encode()
    arrays: dict[str, Any] = {_FACTS: np.frombuffer(described, np.uint8), **save_sequence(cache, sequence)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_warm(path: Path, cache: KVCache, sequence: Sequence, facts: Mapping[str, Any]) -> bool:
    """Puts a saved sequence back into an empty one.

    Returns:
        False, and nothing has changed, if there is no such file, it is damaged or not about these facts, or its tokens
        do not fit.
    """
    try:
        # Before the rows, which may be gigabytes.
        known = json.loads(read_arrays(path, limit=_MOST_FACTS, only={_FACTS})[_FACTS].tobytes())
        tokens = known.pop("tokens")
        if known != dict(facts):
            return False
        saved = read_arrays(path, limit=cache.nbytes + _MOST_FACTS)
        del saved[_FACTS]
        restore_sequence(cache, sequence, tokens, saved)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, TierdError):
        return False
    return True

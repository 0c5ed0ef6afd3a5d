"""Arrays in files of numpy's kinds, `.npz` and `.npy`, that may be damaged or somebody else's.

numpy and zipfile meet damage with exceptions of a dozen kinds, down to those of Python's tokenizer; one changed bit in
the head of an archive is enough for the odd ones. Here all of them are one.
"""

from __future__ import annotations

import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["read_array", "read_arrays"]

_SUFFIX: Final = ".npy"


def read_arrays(path: Path, *, limit: int, only: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
    """Arrays of an `.npz` file by name.

    Args:
        path: of the file.
        limit: most bytes of them together.
        only: names of those that are wanted, where they are there; None: all.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file, is damaged, or holds too much; says what it is.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = {}
            for name, member in _members(archive, limit, only):
                with archive.open(member) as file:
                    found[name] = read_array(file)
            return found
    except (OSError, ValueError):
        raise
    except Exception as error:
        raise ValueError(f"it is damaged: {error}") from error


def read_array(file: IO[bytes]) -> NDArray[Any]:
    """The array of an open `.npy` file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is none.
    """
    try:
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError):
        raise
    except Exception as error:
        raise ValueError(f"it is damaged: {error}") from error
    return array


def _members(archive: zipfile.ZipFile, limit: int, only: Collection[str] | None) -> list[tuple[str, zipfile.ZipInfo]]:
    named = [(member.filename.removesuffix(_SUFFIX), member) for member in archive.infolist()]
    wanted = [(name, member) for name, member in named if only is None or name in only]
    if sum(member.file_size for _, member in wanted) > limit:
        raise ValueError(f"it holds more than {limit} bytes")
    return wanted

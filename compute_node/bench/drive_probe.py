"""How fast the drive under a store delivers records: direct reads of random ones, a few at a time."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Final

import numpy as np

from tierd.errors import DriveError
from tierd.store.reading import huge_page_buffer
from tierd.store.store import ExpertStore

__all__ = ["DriveProbe"]

_READERS: Final = 4


class DriveProbe:
    """Reads records of a store past the page cache, into pages of 2 MiB where the system gives them.

    Args:
        store: whose records are read.
        seed: of their order.

    Raises:
        DriveError: a file cannot be opened.
    """

    def __init__(self, store: ExpertStore, seed: int = 0) -> None:
        geometry = store.geometry
        self._places = [store.location(*geometry.locate(flat)) for flat in range(geometry.experts_total)]
        self._generator = np.random.Generator(np.random.Philox(seed))
        self._files: dict[Path, int] = {}
        self._buffers = [huge_page_buffer(geometry.slot_bytes).data for _ in range(_READERS)]
        for path in {place.path for place in self._places}:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
            except OSError as error:
                self.close()
                raise DriveError(f"{path} cannot be read directly: {error.strerror}", path=str(path)) from error

    def rate(self, seconds: float) -> float:
        """Bytes per second over about so many seconds.

        Raises:
            DriveError: a read failed.
        """
        order = iter(self._generator.permutation(len(self._places)).tolist())
        lock, total, failed = threading.Lock(), [0], list[OSError]()
        deadline = time.perf_counter() + seconds

        def read(buffer: memoryview) -> None:
            while time.perf_counter() < deadline:
                with lock:
                    flat = next(order, None)
                if flat is None:
                    return
                place = self._places[flat]
                try:
                    got = os.preadv(self._files[place.path], [buffer[: place.nbytes]], place.offset)
                except OSError as error:
                    failed.append(error)
                    return
                with lock:
                    total[0] += got

        threads = [threading.Thread(target=read, args=(buffer,)) for buffer in self._buffers]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise DriveError(f"the probe of the drive failed: {failed[0].strerror}", path=str(failed[0].filename or ""))
        return total[0] / (time.perf_counter() - begun)

    def close(self) -> None:
        """Closes the files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

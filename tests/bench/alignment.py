"""Measures whether direct reads care for the alignment of their length: 4 KiB, as records have it, against 64 KiB.

    python tests/bench/alignment.py [--dir DIR] [--rounds 9] [--depth 4] [--json]

Records whose length is a multiple of 4 KiB and not of 64 KiB are read at random places of a file by a few threads, as
the daemon does and into huge pages as it does, beside reads of the length rounded up to 64 KiB; slices take turns, in
turning order. The ratio is that of bytes per second, so it is above 1 where the rounded length is faster; what it reads
in vain is in its bytes, 6 % of the shortest record and less of the others.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from tierd.store.reading import huge_page_buffer

RECORDS = (1 << 20 | 4096, (3 << 20) + 36864, (19 << 20) + 12288)
WIDE = 65536
FILE_BYTES = 2 << 30
SLICE_SECONDS = 0.5


class Reader:
    """Random direct reads of one length from one file."""

    def __init__(self, path: Path, length: int, depth: int) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.length, self.depth = length, depth
        self.buffers = [huge_page_buffer(length).data for _ in range(depth)]

    def rate(self) -> float:
        """Bytes per second over a slice, all threads together."""
        done = [0] * self.depth
        until = time.perf_counter() + SLICE_SECONDS

        def work(number: int) -> None:
            chance = random.Random(number)
            while time.perf_counter() < until:
                offset = chance.randrange((FILE_BYTES - self.length) // 4096) * 4096
                done[number] += os.preadv(self.fd, [self.buffers[number]], offset)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(self.depth)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(done) / (time.perf_counter() - begun)

    def close(self) -> None:
        """Give everything back."""
        os.close(self.fd)
        self.buffers.clear()


def main(
    folder: Annotated[Path | None, typer.Option("--dir", help="On the drive to measure.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 9,
    depth: Annotated[int, typer.Option(min=1, max=64, help="Reads at a time.")] = 4,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure and print."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="tierd-alignment-", dir=folder) as name:
        path = Path(name) / "file"
        block = os.urandom(1 << 24)
        with path.open("wb") as file:
            for _ in range(FILE_BYTES >> 24):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        for record in RECORDS:
            sides = [Reader(path, record, depth), Reader(path, -(-record // WIDE) * WIDE, depth)]
            rates: list[list[float]] = [[], []]
            for number in range(rounds + 1):
                for side in (0, 1) if number % 2 == 0 else (1, 0):
                    rate = sides[side].rate()
                    if number:
                        rates[side].append(rate)
            for side in sides:
                side.close()
            ratio = statistics.median(wide / narrow for narrow, wide in zip(*rates, strict=True))
            rows.append({"length": record, "ratio": ratio, "aligned_4k": rates[0], "aligned_64k": rates[1]})
    if as_json:
        print(json.dumps({"rows": rows, "depth": depth}))
        return
    for row in rows:
        narrow, wide = (statistics.median(row[side]) / 1e9 for side in ("aligned_4k", "aligned_64k"))
        print(f"{row['length']:>9} bytes: {narrow:.2f} GB/s as they are, {wide:.2f} rounded up ({row['ratio']:.2f})")


if __name__ == "__main__":
    typer.run(main)

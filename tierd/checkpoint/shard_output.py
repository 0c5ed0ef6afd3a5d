"""Writing one planned shard: encoded in order, flushed, read back from the drive and compared, then renamed."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np

from tierd.checkpoint.encode import dense_windows, published_scales, row_scales
from tierd.errors import ChecksumMismatch
from tierd.store.checksums import RunningChecksum, xxh3
from tierd.store.reading import aligned_buffer, read_into
from tierd.store.writing import ShardWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from tierd.checkpoint.plan import ConversionPlan, DenseItem, DenseShardPlan
    from tierd.store.shards import ShardHeader
    from tierd.store.writing import ExpertShardPlan

__all__ = ["write_dense_shard", "write_expert_shard"]

VERIFY_BYTES: Final = 8 << 20
"""Bytes that are read back at once."""
MAX_ENCODERS: Final = 4


def write_expert_shard(
    folder: Path, plan: ConversionPlan, shard: ExpertShardPlan, report: Callable[[int], None]
) -> list[int]:
    """Writes the records of a shard; returns their checksums in order.

    A few threads read and encode ahead; the records in memory are bounded by twice their number.
    """
    layouts = plan.geometry
    checksums: list[int] = []
    workers = min(MAX_ENCODERS, len(os.sched_getaffinity(0)))
    with ShardWriter(folder / shard.file, shard.header) as writer, ThreadPoolExecutor(workers) as pool:
        ahead: deque[Future[np.ndarray]] = deque()
        sources = zip(shard.flats, plan.expert_sources(shard), strict=True)
        try:
            for flat, source in sources:
                layout = layouts.layout(layouts.locate(flat)[0])
                ahead.append(pool.submit(source.encode, layout))
                if len(ahead) >= 2 * workers:
                    _write_record(writer, ahead.popleft().result(), checksums, report)
            while ahead:
                _write_record(writer, ahead.popleft().result(), checksums, report)
        finally:
            for future in ahead:
                future.cancel()
        writer.commit(lambda fd, path: _read_back(fd, path, shard.header, checksums))
    return checksums


def write_dense_shard(folder: Path, shard: DenseShardPlan, report: Callable[[int], None]) -> list[int]:
    """Writes the dense tensors of a shard, window by window; returns their checksums in order."""
    checksums: list[int] = []
    with ShardWriter(folder / shard.file, shard.header) as writer:
        for item in shard.items:
            running = RunningChecksum()
            for window in _windows(item):
                writer.write(window)
                running.update(window)
                report(writer.written)
            checksums.append(running.value())
        writer.commit(lambda fd, path: _read_back(fd, path, shard.header, checksums))
    return checksums


def _windows(item: DenseItem) -> Iterator[np.ndarray]:
    if item.scales_of == "fp8":
        assert item.source_scales is not None
        yield published_scales(item.source_scales)
    elif item.scales_of is not None:
        yield row_scales(item.source, item.source_scales)
    else:
        yield from dense_windows(item.source, item.stored, item.source_scales)


def _write_record(writer: ShardWriter, record: np.ndarray, checksums: list[int], report: Callable[[int], None]) -> None:
    writer.write(record)
    checksums.append(xxh3(record))
    report(writer.written)


def _read_back(fd: int, path: Path, header: ShardHeader, checksums: list[int]) -> None:
    """Reads every byte of a written shard again; ChecksumMismatch, naming the tensor, if one differs."""
    start = np.empty(header.header_bytes, dtype=np.uint8)
    read_into(fd, start, 0, path)
    if start.tobytes() != header.raw:
        raise _differs(path, "the header", 0, header.header_bytes)
    buffer = aligned_buffer(min(VERIFY_BYTES, max(entry.nbytes for entry in header.tensors.values())))
    for entry, expected in zip(header.tensors.values(), checksums, strict=True):
        running = RunningChecksum()
        for offset in range(entry.begin, entry.end, buffer.nbytes):
            window = buffer[: min(buffer.nbytes, entry.end - offset)]
            read_into(fd, window, offset, path)
            running.update(window)
        if running.value() != expected:
            raise _differs(path, entry.name, entry.begin, entry.nbytes)


def _differs(path: Path, what: str, offset: int, length: int) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"{path}: {what} was read back different from what was written (offset {offset}, {length} bytes)",
        path=str(path),
        offset=offset,
        length=length,
        hint="The drive or the memory does not keep what it is given; check both before going on.",
    )

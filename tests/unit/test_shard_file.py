"""Direct reads, the fallback to the page cache, short reads and errors of one shard file."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from pathlib import Path

import pytest
import structlog
import xxhash
from rigs import cached_pages, drop_cached_pages

from tierd.devices.device import RecordRead
from tierd.devices.files import FileDevice
from tierd.devices.pieces import Pieces
from tierd.devices.shard_file import ShardFile
from tierd.errors import DriveError, UsageError

NBYTES = 16384
OFFSET = 8192


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "experts-1.safetensors"
    file.write_bytes(os.urandom(OFFSET + NBYTES + 777))
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return file


@pytest.fixture
def into():
    return memoryview(mmap.mmap(-1, NBYTES))


def expected(path):
    return path.read_bytes()[OFFSET : OFFSET + NBYTES]


def refuse_direct_open(monkeypatch, only=""):
    """A filesystem that refuses direct reads when the file is opened."""
    real = os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT and only in str(path):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)


def refuse_direct_transfers(monkeypatch, number=errno.EINVAL):
    """A filesystem that opens the file directly and fails direct transfers."""
    real = os.preadv

    def refusing(fd, buffers, offset):
        if os.O_DIRECT & open_flags(fd):
            raise OSError(number, os.strerror(number))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)


def open_flags(fd):
    return fcntl.fcntl(fd, fcntl.F_GETFL)


def test_an_ordinary_file_is_read_directly(path, into):
    file = ShardFile("nvme", path, direct=True)
    assert file.direct
    file.read(OFFSET, into)
    assert into == expected(path)
    file.close()


@pytest.mark.parametrize("refuse", [refuse_direct_open, refuse_direct_transfers])
def test_a_filesystem_that_refuses_direct_reads_is_read_buffered(monkeypatch, path, into, refuse):
    refuse(monkeypatch)
    file = ShardFile("nas", path, direct=True)
    assert not file.direct
    file.read(OFFSET, into)
    assert into == expected(path)
    file.close()


def test_a_refusal_in_mid_service_falls_back_with_one_warning_and_the_same_file(monkeypatch, path, into):
    file = ShardFile("nvme", path, direct=True)
    right = expected(path)
    refuse_direct_transfers(monkeypatch)
    path.unlink()
    path.write_bytes(b"another file" * 4096)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            file.read(OFFSET, into)
    assert into == right
    assert not file.direct
    assert [(log["log_level"], log["drive"], log["path"]) for log in logs] == [("warning", "nvme", str(path))]
    file.close()


def test_a_failing_drive_is_an_error_and_no_reason_to_read_buffered(monkeypatch, path, into):
    file = ShardFile("nvme", path, direct=True)
    refuse_direct_transfers(monkeypatch, errno.EIO)
    with pytest.raises(DriveError, match="Input/output error") as caught:
        file.read(OFFSET, into)
    assert (caught.value.path, caught.value.offset) == (str(path), OFFSET)
    assert (caught.value.length, caught.value.errno) == (NBYTES, errno.EIO)
    assert file.direct
    file.close()


def test_a_drive_that_fails_its_first_read_is_opened_all_the_same(monkeypatch, path):
    refuse_direct_transfers(monkeypatch, errno.EIO)
    with structlog.testing.capture_logs() as logs:
        file = ShardFile("nvme", path, direct=True)
    assert file.direct
    assert [log["path"] for log in logs] == [str(path)]
    file.close()


def stop_after(monkeypatch, most):
    """Transfers that end early, after `most` bytes, and check that direct ones are asked for something aligned."""
    real = os.preadv

    def short(fd, buffers, offset):
        (buffer,) = buffers
        if open_flags(fd) & os.O_DIRECT:
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            assert (offset % 4096, len(buffer) % 4096, address % 4096) == (0, 0, 0)
        whole = memoryview(mmap.mmap(-1, len(buffer)))
        count = min(real(fd, [whole], offset), most)
        buffer[:count] = whole[:count]
        return count

    monkeypatch.setattr(os, "preadv", short)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("most", [512, 4096, 10_000])
def test_short_reads_are_continued(monkeypatch, path, into, direct, most):
    file = ShardFile("nvme", path, direct=direct)
    stop_after(monkeypatch, most)
    if direct and most < 4096:
        # Never past a block border is no progress: it must end, and not as if the file were cut.
        with pytest.raises(DriveError, match=f"gave only {most} of {NBYTES} bytes"):
            file.read(OFFSET, into)
    else:
        file.read(OFFSET, into)
        assert into == expected(path)
    file.close()


def test_the_end_of_a_file_that_is_no_multiple_of_a_block_is_named(path, into):
    for direct in (True, False):
        file = ShardFile("nvme", path, direct=direct)
        with pytest.raises(DriveError, match=f"{NBYTES - 4096 - 777} of {NBYTES} bytes at offset"):
            file.read(OFFSET + NBYTES - 4096, into)
        file.close()


def test_a_missing_file_is_named(tmp_path):
    for direct in (True, False):
        with pytest.raises(DriveError, match=r"cannot open .*absent") as caught:
            ShardFile("nvme", tmp_path / "absent", direct=direct)
        assert caught.value.errno == errno.ENOENT
        assert "mounted" in caught.value.hint


def test_buffered_reads_leave_nothing_in_the_page_cache(path, into):
    expected(path)
    assert cached_pages(path) > 0
    drop_cached_pages(path)
    before = cached_pages(path)
    file = ShardFile("nas", path, direct=False)
    file.read(OFFSET, into)
    assert cached_pages(path) == before
    file.close()


async def test_one_refusing_shard_leaves_the_others_direct_and_warns_once(monkeypatch, tmp_path, path):
    second = tmp_path / "nodirect.safetensors"
    second.write_bytes(path.read_bytes())
    refuse_direct_open(monkeypatch, only="nodirect")
    with structlog.testing.capture_logs() as logs:
        device = FileDevice("mixed", [path, second], asyncio.get_running_loop().call_soon_threadsafe)
    assert [(log["log_level"], log["first"], log["files"]) for log in logs] == [("warning", str(second), 1)]
    assert not device.stats.direct
    assert [file.direct for file in device._files] == [True, False]
    assert "buffered" in repr(device)
    device.close()


def test_a_device_over_a_missing_file_leaves_nothing_open(tmp_path, path):
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(DriveError, match="absent"):
        FileDevice("nvme", [path, tmp_path / "absent"], lambda call: call())
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    with pytest.raises(UsageError, match="0 read threads"):
        FileDevice("nvme", [path], lambda call: call(), threads=0)


class OneSlot:
    """Memory of a single attempt."""

    def __init__(self):
        self.block = memoryview(mmap.mmap(-1, 4096))

    def view(self, slot, nbytes):
        del slot, nbytes
        return self.block


def test_reads_that_end_after_the_loop_was_closed_are_dropped_quietly(path):
    loop = asyncio.new_event_loop()
    device = FileDevice("nvme", [path], loop.call_soon_threadsafe, threads=1)
    loop.close()
    device.submit(RecordRead(0, 0, 0, 0, 0, 4096, 0), 0, OneSlot(), pytest.fail)
    device.close()


def test_a_drive_that_never_answers_does_not_hold_up_closing(monkeypatch, path):
    answer, asked = threading.Event(), threading.Event()
    real = os.preadv

    def hanging(fd, buffers, offset):
        asked.set()
        answer.wait(20)
        return real(fd, buffers, offset)

    errors = []
    finished = threading.Event()
    device = FileDevice("dead", [path], lambda call: call(), threads=1, close_timeout=0.05)
    monkeypatch.setattr(os, "preadv", hanging)
    data = path.read_bytes()[:4096]
    memory = OneSlot()

    def done(error, _slot):
        errors.append(error)
        finished.set()

    device.submit(RecordRead(0, 0, 0, 0, 0, 4096, xxhash.xxh3_64_intdigest(data)), 0, memory, done)
    assert asked.wait(10)
    with structlog.testing.capture_logs() as logs:
        device.close()
    assert logs[0]["drive"] == "dead"
    answer.set()
    assert finished.wait(10)
    assert errors == [None], "its descriptor was still the right one"
    assert memory.block == data


@pytest.mark.parametrize(("part", "step"), [(ShardFile, "read"), (Pieces, "leave")])
def test_something_unforeseen_inside_a_read_still_ends_in_done(monkeypatch, path, part, step):
    results = []
    finished = threading.Event()
    device = FileDevice("nvme", [path], lambda call: call())
    monkeypatch.setattr(part, step, lambda *_: 1 // 0)

    def done(error, _slot):
        results.append(error)
        finished.set()

    device.submit(RecordRead(0, 3, 5, 0, 0, 4096, 0), 0, OneSlot(), done)
    assert finished.wait(10)
    finished.clear()
    device.submit(RecordRead(0, 3, 6, 0, 0, 4096, 0), 0, OneSlot(), done, ahead=True)
    assert finished.wait(10), "the drive does not think that it is at work"
    device.close()
    for expert, error in zip((5, 6), results, strict=True):
        assert f"layer 3, expert {expert}: unforeseen ZeroDivisionError" in error.message

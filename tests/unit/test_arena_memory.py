from __future__ import annotations

import errno
import fcntl
import mmap
import os
import platform
import resource
import tempfile
from pathlib import Path

import pytest
import structlog

from tierd.arena import memory
from tierd.arena.memory import EXTENT_BYTES, PayloadView, SharedPayload
from tierd.errors import ArenaError, UsageError

TMPFS = Path("/dev/shm")


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(params=["memfd", "tmpfs"])
def directory(request):
    return None if request.param == "memfd" else TMPFS


@pytest.fixture
def payload(directory):
    made = SharedPayload.create(3 * EXTENT_BYTES - 5, directory)
    yield made
    made.close()


def test_size_and_address_are_multiples_of_a_huge_page(payload):
    assert payload.nbytes == 3 * EXTENT_BYTES
    assert payload.address % EXTENT_BYTES == 0


def test_an_arena_of_one_byte_is_one_extent(directory):
    payload = SharedPayload.create(1, directory)
    assert payload.nbytes == EXTENT_BYTES
    payload.view(0, 1)[0] = 9
    view = PayloadView.attach(payload.reader_fd(), payload.nbytes)
    assert view.view(0, 1)[0] == 9
    view.close()
    payload.close()


def test_a_reader_sees_what_is_written_through_a_view(payload):
    view = PayloadView.attach(payload.reader_fd(), payload.nbytes)
    assert view.address % EXTENT_BYTES == 0
    payload.view(EXTENT_BYTES - 3, 6)[:] = b"expert"
    assert bytes(view.view(EXTENT_BYTES - 3, 6)) == b"expert"
    assert view.view(0, 1).readonly
    view.close()


def test_views_outside_the_arena_are_refused(payload):
    for offset, nbytes in [(-1, 1), (0, payload.nbytes + 1), (payload.nbytes, 1), (5, -1)]:
        with pytest.raises(ArenaError, match="outside the arena"):
            payload.view(offset, nbytes)


def test_a_direct_read_lands_in_a_view(payload, tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(8192))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    assert os.preadv(fd, [payload.view(4096, 8192)], 0) == 8192
    os.close(fd)
    assert bytes(payload.view(4096, 8192)) == path.read_bytes()


def test_prefaulting_brings_huge_pages_that_are_empty(payload):
    payload.start_prefault()
    assert payload.wait_prefault(30)
    assert payload.view(0, payload.nbytes) == bytes(payload.nbytes)
    assert payload.populated_bytes == payload.nbytes
    assert payload.huge_page_bytes == memory._huge_bytes_of(payload.address, payload.nbytes)
    major, minor = map(int, platform.release().split("-")[0].split(".")[:2])
    if (major, minor) >= (6, 1):
        assert payload.huge_page_bytes == payload.nbytes


def locked_by_the_kernel(payload):
    """Bytes of the payload's mapping that smaps shows as locked."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key = line.split(maxsplit=1)[0]
        if not key.endswith(":"):
            inside = payload.address <= int(key.partition("-")[0], 16) < payload.address + payload.nbytes
        elif inside and key == "Rss:":
            resident = int(line.split()[1]) * 1024
        elif inside and key == "VmFlags:" and "lo" in line.split():
            found += resident
    return found


@pytest.mark.skipif(
    os.getuid() > 0 and 0 <= resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < 4 * EXTENT_BYTES,
    reason="this user may lock less memory than the test needs",
)
def test_what_is_in_use_is_locked_and_what_is_given_back_is_not(payload):
    payload.start_prefault()
    assert payload.wait_prefault(30)
    assert payload.locked_bytes == payload.nbytes == locked_by_the_kernel(payload)
    payload.shrink(EXTENT_BYTES)
    payload.punch()
    assert payload.locked_bytes == EXTENT_BYTES == locked_by_the_kernel(payload)
    assert payload.view(2 * EXTENT_BYTES, 4) == bytes(4)
    assert locked_by_the_kernel(payload) == EXTENT_BYTES
    payload.grow(2 * EXTENT_BYTES)
    assert payload.wait_prefault(30)
    assert payload.locked_bytes == 2 * EXTENT_BYTES == locked_by_the_kernel(payload)


def test_an_arena_that_may_not_be_locked_works_and_says_so(monkeypatch, payload):
    monkeypatch.setattr(memory._libc, "mlock", lambda _address, _nbytes: -1)
    payload.start_prefault()
    assert payload.wait_prefault(30)
    assert payload.locked_bytes == locked_by_the_kernel(payload) == 0
    payload.view(0, 2)[:] = b"ok"


def test_prefaulting_keeps_the_bytes_that_landed_before_it(payload):
    payload.view(100, 4)[:] = b"kept"
    payload.start_prefault()
    assert payload.wait_prefault(30)
    assert bytes(payload.view(100, 4)) == b"kept"
    assert payload.view(104, 3000) == bytes(3000)


def test_on_a_tmpfs_all_memory_is_reserved_at_once():
    payload = SharedPayload.create(3 * EXTENT_BYTES, TMPFS)
    assert os.fstat(payload._fd).st_blocks * 512 == payload.nbytes == payload.populated_bytes
    payload.close()


def test_extents_that_could_not_be_collapsed_are_reserved_and_tried_again(monkeypatch):
    collapse = memory._MADV_COLLAPSE
    monkeypatch.setattr(memory, "_MADV_COLLAPSE", 12345)
    payload = SharedPayload.create(2 * EXTENT_BYTES, TMPFS)
    assert payload.huge_page_bytes == 0
    assert os.fstat(payload._fd).st_blocks * 512 == payload.nbytes
    payload.view(100, 4)[:] = b"kept"
    monkeypatch.setattr(memory, "_MADV_COLLAPSE", collapse)
    payload.start_prefault()
    assert payload.wait_prefault(30)
    assert payload.huge_page_bytes == memory._huge_bytes_of(payload.address, payload.nbytes)
    assert bytes(payload.view(100, 4)) == b"kept"
    payload.close()


def test_without_huge_pages_the_arena_still_works(monkeypatch, directory):
    monkeypatch.setattr(memory, "_MADV_COLLAPSE", 12345)
    payload = SharedPayload.create(2 * EXTENT_BYTES, directory)
    payload.start_prefault()
    assert payload.wait_prefault(30)
    assert payload.populated_bytes == payload.nbytes
    payload.view(0, 2)[:] = b"ok"
    payload.close()


def test_nodes_cannot_write_through_their_descriptor(payload):
    fd = payload.reader_fd()
    assert os.fstat(fd).st_mode & 0o777 == 0o400
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def test_a_memfd_cannot_change_its_size_but_can_give_memory_back():
    payload = SharedPayload.create(1)
    with pytest.raises(PermissionError):
        os.ftruncate(payload._fd, 0)
    seals = fcntl.fcntl(payload._fd, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    payload.close()


def test_no_file_is_left_in_the_directory():
    before = set(TMPFS.iterdir())
    payload = SharedPayload.create(1, TMPFS)
    assert set(TMPFS.iterdir()) - before == set()
    payload.close()


def test_memory_stays_readable_for_a_node_after_the_daemon_closed(directory):
    payload = SharedPayload.create(1, directory)
    payload.view(0, 4)[:] = b"here"
    view = PayloadView.attach(payload.reader_fd(), payload.nbytes)
    payload.close()
    payload.close()
    assert bytes(view.view(0, 4)) == b"here"
    view.close()
    view.close()


def test_too_large_an_arena_names_what_is_needed_and_free(directory):
    with pytest.raises(ArenaError, match=str(1 << 60)) as caught:
        SharedPayload.create(1 << 60, directory)
    assert "--arena" in caught.value.hint


def run_out(_fd, _offset, _nbytes):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_tmpfs_that_fills_up_meanwhile_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", run_out)
    descriptors = open_descriptors()
    with pytest.raises(ArenaError, match=f"needs {EXTENT_BYTES} bytes in /dev/shm"):
        SharedPayload.create(1, TMPFS)
    assert open_descriptors() == descriptors


def test_memory_that_runs_short_in_the_background_is_said_and_no_more(monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", run_out)
    with structlog.testing.capture_logs() as logs:
        payload = SharedPayload.create(1)
        payload.start_prefault()
        assert payload.wait_prefault(30)
    assert [log["log_level"] for log in logs] == ["warning"]
    payload.view(0, 2)[:] = b"ok"
    payload.close()


def test_no_descriptor_stays_open_after_close(directory):
    descriptors = open_descriptors()
    payload = SharedPayload.create(1, directory)
    payload.start_prefault()
    payload.close()
    assert open_descriptors() == descriptors


def test_unusable_directories_and_sizes_are_named(tmp_path):
    with pytest.raises(UsageError, match="absent"):
        SharedPayload.create(1, tmp_path / "absent")
    with pytest.raises(UsageError, match="/proc is not on a tmpfs"):
        SharedPayload.create(1, Path("/proc"))
    with (
        tempfile.NamedTemporaryFile(dir=TMPFS) as file,
        pytest.raises(UsageError, match="cannot hold the arena: Not a directory"),
    ):
        SharedPayload.create(1, Path(file.name))
    with pytest.raises(UsageError, match="0 bytes"):
        SharedPayload.create(0)


def test_a_reader_refuses_a_file_shorter_than_told(payload):
    with pytest.raises(ArenaError, match=f"its file has {payload.nbytes}"):
        PayloadView.attach(payload.reader_fd(), payload.nbytes + EXTENT_BYTES)
    with pytest.raises(ArenaError, match="told an arena of 4096"):
        PayloadView.attach(payload.reader_fd(), 4096)

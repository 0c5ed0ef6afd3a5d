from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.arena.table import (
    ABSENT,
    GENERATIONS,
    MAX_SLOTS,
    ResidencyTable,
    ResidencyView,
    next_generation,
    pack,
    unpack,
)
from tierd.errors import ArenaError, LimitExceeded

BOOT = bytes(range(16))


@pytest.fixture
def table():
    made = ResidencyTable.create(BOOT, slot_bytes=8192, slots=3, entries=1000)
    yield made
    made.close()


@given(st.integers(1, GENERATIONS - 1), st.integers(0, MAX_SLOTS - 1))
def test_a_word_holds_generation_and_slot(generation, slot):
    word = pack(generation, slot)
    assert unpack(word) == (generation, slot)
    assert word != ABSENT
    assert word < 1 << 64


@pytest.mark.parametrize(("generation", "slot"), [(0, 0), (GENERATIONS, 0), (1, -1), (1, MAX_SLOTS)])
def test_what_does_not_fit_a_word_is_refused(generation, slot):
    with pytest.raises(LimitExceeded):
        pack(generation, slot)


def test_the_generation_after_the_last_is_one():
    assert next_generation(0) == 1
    assert next_generation(GENERATIONS - 1) == 1


def test_an_absent_word_names_no_slot():
    with pytest.raises(ArenaError, match="no slot"):
        unpack(ABSENT)


def test_a_reader_sees_what_the_writer_stores(table):
    view = ResidencyView.attach(table.reader_fd())
    assert view.header == table.header
    assert view.load(999) == ABSENT
    word = pack(GENERATIONS - 1, 2)
    table.store(999, word)
    assert view.load(999) == table.load(999) == word == int(view.words[999])
    assert ctypes.c_uint64.from_address(view.address + 8 * 999).value == word
    assert view.unchanged(999, word)
    table.store(999, ABSENT)
    assert not view.unchanged(999, word)
    view.close()


def test_words_are_aligned_so_that_one_access_is_one_instruction(table):
    view = ResidencyView.attach(table.reader_fd())
    assert view.address % 8 == 0
    view.close()


def test_indexes_outside_the_table_are_refused(table):
    with pytest.raises(IndexError):
        table.store(1000, 1)
    with pytest.raises(IndexError):
        table.load(1000)


def test_a_node_cannot_write_the_table(table):
    fd = table.reader_fd()
    with pytest.raises(OSError, match="Permission denied"):
        mmap.mmap(fd, 8192, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    # Root passes the file mode; the seal stops it too.
    with pytest.raises(PermissionError), Path(f"/proc/self/fd/{fd}").open("r+b", buffering=0) as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="read-only"):
        ResidencyView.attach(fd).words[0] = 1


def test_the_writer_is_never_seen_with_half_a_word(table):
    """Another process looks while words whose halves must agree are stored; a torn access would show at once."""
    reader = (
        "import sys; from tierd.arena.table import ResidencyView\n"
        "view = ResidencyView.attach(int(sys.argv[1])); words = set()\n"
        "sys.stdout.write('r'); sys.stdout.flush()\n"
        "for _ in range(200_000):\n"
        "    word = view.load(5); words.add(word)\n"
        "    assert word >> 32 == word & 0xffffffff, hex(word)\n"
        "print(len(words))\n"
    )
    fd = table.reader_fd()
    with subprocess.Popen(
        [sys.executable, "-c", reader, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.read(1) == "r"
        n = 0
        while process.poll() is None:
            for _ in range(1000):
                n = (n + 0x01010101) & 0xFFFFFFFF
                table.store(5, n << 32 | n)
        assert process.returncode == 0
        assert int(process.stdout.read()) > 1


def test_views_held_after_close_stay_readable(table):
    view = ResidencyView.attach(table.reader_fd())
    words = view.words
    table.store(0, 77)
    view.close()
    assert int(words[0]) == 77


def test_memory_that_is_no_table_is_refused():
    fd = os.memfd_create("other")
    try:
        with pytest.raises(ArenaError, match="less than its header"):
            ResidencyView.attach(fd)
        os.ftruncate(fd, 8192)
        with pytest.raises(ArenaError, match="not a residency table"):
            ResidencyView.attach(fd)
    finally:
        os.close(fd)


def test_a_table_that_is_shorter_than_it_says_is_refused(table):
    fd = os.memfd_create("short")
    try:
        os.write(fd, os.pread(table.reader_fd(), 8192, 0))
        with pytest.raises(ArenaError, match="1000 experts but has 8192 bytes"):
            ResidencyView.attach(fd)
        os.pwrite(fd, b"\x09", 8)
        with pytest.raises(ArenaError, match="version 9"):
            ResidencyView.attach(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"slots": MAX_SLOTS + 1}, {"entries": 0}, {"slot_bytes": 0}])
def test_impossible_sizes_are_refused(wrong):
    with pytest.raises(LimitExceeded):
        ResidencyTable.create(BOOT, **({"slot_bytes": 4096, "slots": 1, "entries": 1} | wrong))

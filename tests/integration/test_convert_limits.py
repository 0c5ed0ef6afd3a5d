"""Conversion on bad or small drives: refused or stopped in time, never a wrong byte, in bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import resource
from pathlib import Path

import pytest
from conversions import CONFIG, SMALL_SHARDS, in_child

from tierd.checkpoint import destination
from tierd.checkpoint.convert import Conversion, convert
from tierd.checkpoint.synthetic import make_checkpoint
from tierd.errors import ChecksumMismatch, DriveError, LimitExceeded, UsageError
from tierd.store import writing
from tierd.store.verification import verify_store


class TinyDrive:
    """What statvfs would say of a drive with this many free bytes."""

    f_frsize = 1

    def __init__(self, free):
        self.f_bavail = free


def test_too_little_space_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "m", CONFIG)
    monkeypatch.setattr(destination.os, "statvfs", lambda _: TinyDrive(16 << 20))
    with pytest.raises(LimitExceeded, match="short") as caught:
        convert(tmp_path / "m", tmp_path / "s")
    assert "--consume" in caught.value.hint
    assert not (tmp_path / "s").exists()


def test_consuming_needs_less_space(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "m", CONFIG, shards=4)
    plan = Conversion.prepare(tmp_path / "m", tmp_path / "s", shard_bytes=SMALL_SHARDS).plan
    monkeypatch.setattr(destination.os, "statvfs", lambda _: TinyDrive((16 << 20) + plan.shard_bytes - 4096))
    with pytest.raises(LimitExceeded):
        convert(tmp_path / "m", tmp_path / "s", shard_bytes=SMALL_SHARDS)
    convert(tmp_path / "m", tmp_path / "s", shard_bytes=SMALL_SHARDS, consume=True)
    assert verify_store(tmp_path / "s").ok


def convert_with_file_limit(source, target, limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        convert(source, target)
    except DriveError as error:
        os._exit(42 if "run the same command again" in error.hint else 1)
    os._exit(0)


def test_a_drive_that_takes_no_more_stops_it_and_it_can_go_on(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG)
    assert in_child(convert_with_file_limit, tmp_path / "m", tmp_path / "s", 20_000) == 42
    assert not (tmp_path / "s" / "store.json").exists()
    assert not list((tmp_path / "s").glob("*.partial"))
    convert(tmp_path / "m", tmp_path / "s")
    assert verify_store(tmp_path / "s").ok


def test_bytes_that_the_drive_changed_are_found_before_the_shard_is_used(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "m", CONFIG)
    fsync = os.fsync

    def fsync_on_a_bad_drive(fd):
        fsync(fd)
        if Path(f"/proc/self/fd/{fd}").readlink().name == "experts-00001.safetensors.partial":
            os.pwrite(fd, b"\xff\xfe", 4096 + 100)

    monkeypatch.setattr(writing.os, "fsync", fsync_on_a_bad_drive)
    with pytest.raises(ChecksumMismatch, match=r"layers\.0\.experts\.0 was read back different"):
        convert(tmp_path / "m", tmp_path / "s")
    assert not (tmp_path / "s" / "experts-00001.safetensors").exists()
    monkeypatch.undo()
    convert(tmp_path / "m", tmp_path / "s")
    assert verify_store(tmp_path / "s").ok


def test_a_source_cut_while_it_is_converted_is_an_error_and_never_zeros(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG)
    path = tmp_path / "m" / "model.safetensors"
    size = path.stat().st_size

    def cut(state):
        if state.shard == 2:
            os.truncate(path, size // 3)

    with pytest.raises(DriveError, match=r"model\.safetensors: the file ends"):
        convert(tmp_path / "m", tmp_path / "s", shard_bytes=SMALL_SHARDS, progress=cut)


def test_weights_that_are_not_numbers_are_refused_by_tensor(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG)
    path = tmp_path / "m" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-64:] = b"\xff" * 64
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    start = data.index(b'"data_offsets":[', data.index(name.encode())) + len(b'"data_offsets":[')
    begin = 8 + int.from_bytes(data[:8], "little") + int(data[start : data.index(b",", start)])
    data[begin : begin + 2] = b"\xff\xff"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=rf"tensor {name}: a weight is NaN"):
        convert(tmp_path / "m", tmp_path / "s", experts="int4-g64")


def convert_and_tell_memory(source, target, pipe):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    convert(source, target, experts="int8", dense="int8")
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_memory_stays_far_below_the_size_of_a_shard(tmp_path):
    config = CONFIG | {"hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 16, "vocab_size": 20_000}
    make_checkpoint(tmp_path / "m", config)
    receive, send = multiprocessing.Pipe(duplex=False)
    assert in_child(convert_and_tell_memory, tmp_path / "m", tmp_path / "s", send) == 0
    shard_kib = (tmp_path / "m" / "model.safetensors").stat().st_size // 1024
    assert receive.recv() < shard_kib

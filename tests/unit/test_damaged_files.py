"""Whatever is wrong with a small file of an earlier run, it is left aside or refused with a reason; nothing fails."""

from __future__ import annotations

import asyncio
import json
import random
import struct
import zipfile

import numpy as np
import pytest

from compute_node.bench import memory_bandwidth
from compute_node.commands.session_file import SessionFile
from compute_node.engine.oracle import read_reference
from compute_node.prediction.table_file import TableFile
from tierd.array_files import read_arrays
from tierd.devices.probe import DriveProbe
from tierd.devices.probe_cache import ProbeCache
from tierd.errors import TierdError
from tierd.mirror.history import read_uses
from tierd.mirror.receipt import Receipt, read_receipt
from tierd.policy.token_table import TokenTable
from tierd.policy.trace import load_trace
from tierd.profiles import NodeTuned, Profile, ServeTuned, load_profile, save_profile
from tierd.service.history import HistoryFile
from tierd.store.verification_notes import CheckedShard, VerificationNotes
from tierd.tuning.journal import Journal
from tierd.tuning.sweep import Outcome

STORE = "f" * 64
ODD = (None, True, -1, float("inf"), float("nan"), 10**400, "", "x", [], {}, [[]], 2**64)


def damaged(data, flips):
    """The file cut off, with bytes changed, removed and doubled, and other files in its place."""
    rng = random.Random(1)
    size = len(data)
    yield from (b"", b"\0" * 99, b"[]", b"null", b"[" * 100_000, b"1e999", b"\xff\xfe", b"PK\x05\x06" + b"\0" * 18)
    yield from (data[:cut] for cut in (1, 4, 30, size // 2, size - 22, size - 1))
    yield data * 2
    for place in [*range(min(size, 40)), *range(max(0, size - 60), size), *rng.sample(range(size), min(size, flips))]:
        yield data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def odd_values(data):
    """The JSON with each of its values replaced by others, or left out."""
    whole = json.loads(data)

    def places(value, at=()):
        yield at
        if isinstance(value, dict | list):
            for key in list(value)[:6] if isinstance(value, dict) else range(len(value))[:2]:
                yield from places(value[key], (*at, key))

    for *path, last in list(places(whole))[1:]:
        for odd in (*ODD, "gone"):
            copy = parent = json.loads(data)
            for key in path:
                parent = parent[key]
            if odd == "gone":
                del parent[last]
            else:
                parent[last] = odd
            yield json.dumps(copy).encode()


def odd_archives(data):
    """The archive with other flags, versions and ways to compress, in each of its members' two heads."""
    for local, central, value in [
        (8, 10, 8),
        (8, 10, 14),
        (8, 10, 99),
        (6, 8, 1),
        (6, 8, 0x20),
        (6, 8, 0x40),
        (4, 6, 99),
    ]:
        copy = bytearray(data)
        for mark, offset in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
            place = -1
            while (place := copy.find(mark, place + 1)) >= 0:
                copy[place + offset] = value
        yield bytes(copy)


def tried(path, read, *ways, flips=30):
    """Reads a file's damaged versions, and in the end the right one."""
    right = path.read_bytes()
    for version in [*damaged(right, flips), *(version for way in ways for version in way(right))]:
        path.write_bytes(version)
        try:
            read()
        except TierdError:
            continue
        except Exception as error:  # noqa: BLE001 - whatever it is, the test says of which version
            pytest.fail(f"{version[:200]!r}: {error!r}")
    path.write_bytes(right)
    return read()


def test_a_usage_history(tmp_path):
    file = HistoryFile(tmp_path / "history.json", STORE, 4)
    asyncio.run(file.save(np.arange(4.0)))
    with asyncio.Runner() as runner:
        read = tried(file.path, lambda: runner.run(HistoryFile(file.path, STORE, 4).load()), odd_values, flips=20)
    assert read.tolist() == [0, 1, 2, 3]


def test_uses_for_a_plan(tmp_path):
    (tmp_path / "uses.json").write_text(json.dumps({"fingerprint": STORE, "counts": [1.0, 2.0]}))
    np.save(tmp_path / "uses.npy", np.array([1.0, 2.0]))
    for name in ("uses.json", "uses.npy"):
        ways = [odd_values] if name.endswith("json") else []
        assert tried(tmp_path / name, lambda name=name: read_uses(tmp_path / name, STORE), *ways).tolist() == [1, 2]


def test_a_learned_table(tmp_path):
    table, file = TokenTable([4, 4], max_bytes=1 << 16), TableFile(tmp_path, STORE)
    for token in range(9):
        table.count(token % 3, np.array([[token % 4], [4 + token % 3]], np.int32), previous=token and (token - 1) % 3)
    file.save(table)

    def read():
        again = TokenTable([4, 4], max_bytes=1 << 16)
        problem = file.load(again)
        again.now.probabilities(1)
        again.count(1, np.array([[1], [5]], np.int32), previous=2)
        return problem

    assert tried(file.path, read, odd_archives, flips=60) == ""


def test_a_trace_and_a_reference(tmp_path):
    tokens, experts = np.arange(6), np.tile(np.int32([0, 1]), (6, 1, 1))
    np.savez(tmp_path / "trace.npz", tokens=tokens, experts=experts, window=6)
    assert len(tried(tmp_path / "trace.npz", lambda: load_trace(tmp_path / "trace.npz"), odd_archives)) == 6
    np.savez_compressed(
        tmp_path / "ref.npz", input_ids=tokens[None], logits=np.zeros((1, 6, 9), np.float32), greedy=tokens
    )
    read = tried(tmp_path / "ref.npz", lambda: read_reference(tmp_path / "ref.npz"), odd_archives, flips=30)
    assert read.input_ids == tokens.tolist()


@pytest.mark.parametrize(
    "head",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': [('a',)], 'fortran_order': 1, 'shape': (), }",
        "((",
    ],
)
def test_arrays_that_cannot_be(tmp_path, head):
    text = head.encode() + b"\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + b"\0" * 8)
    with pytest.raises(ValueError, match=r"."):
        read_arrays(tmp_path / "a.npz", limit=1 << 20)
    with pytest.raises(ValueError, match="more than 9 bytes"):
        read_arrays(tmp_path / "a.npz", limit=9)


def test_a_saved_conversation(tmp_path):
    file = SessionFile(tmp_path / "chat.json", STORE)
    messages = [{"role": "user", "content": "hello"}]
    file.save(messages)
    assert tried(file.path, file.load, odd_values).messages == messages


def test_what_was_measured_and_tuned(tmp_path, monkeypatch):
    cache = ProbeCache(tmp_path)
    cache.save("drive", DriveProbe(1e9, 8, "measured"))
    assert tried(tmp_path / "drive.json", lambda: cache.load("drive"), odd_values).depth == 8
    (tmp_path / "memory.json").write_text(json.dumps({"version": 2, "bytes_per_second": 1e10, "tries": 1}))
    assert (
        tried(tmp_path / "memory.json", lambda: memory_bandwidth._load(tmp_path / "memory.json"), odd_values).tries == 1
    )
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    profile = Profile(
        fingerprint=STORE,
        serve=ServeTuned(),
        node=NodeTuned(threads=2),
        limit="drive",
        tokens_per_second={},
        made="now",
    )
    assert tried(save_profile(profile), lambda: load_profile(STORE), odd_values) == (profile, "")


def test_notes_of_work_that_was_interrupted(tmp_path):
    shard = tmp_path / "a.safetensors"
    shard.write_bytes(b"x")
    notes = VerificationNotes.open(tmp_path, tmp_path, STORE, 1e6)
    notes.add(shard, CheckedShard(1, 2, 3))
    (file,) = tmp_path.glob("verification-*.json")
    read = tried(file, lambda: VerificationNotes.open(tmp_path, tmp_path, STORE, 1e6).find(shard), odd_values)
    assert read == CheckedShard(1, 2, 3)
    Receipt(STORE, "/store", {"a.safetensors": (1, 2)}, complete=True).save(tmp_path)
    assert tried(tmp_path / "mirror.json", lambda: read_receipt(tmp_path), odd_values).complete
    journal = Journal(tmp_path / "journal.json", {"machine": 1})
    journal.add(Outcome({"threads": 1}, (1.0,), "digest", {}))
    read = tried(tmp_path / "journal.json", lambda: len(Journal(tmp_path / "journal.json", {"machine": 1})), odd_values)
    assert read == 1

"""Verification reads everything and lists every problem, not only the first."""

from __future__ import annotations

import numpy as np
import pytest

from tierd.errors import UsageError
from tierd.store.synthetic import make_store
from tierd.store.verification import verify_store


@pytest.fixture
def store(tmp_path):
    dense = {"a": np.ones((4, 4), np.float32), "b": np.ones(8, np.float32)}
    return make_store(
        tmp_path / "s", layers=2, experts=4, top_k=1, fill="pattern", shard_bytes=40_000, dense=dense, config={}
    )


def damage(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_good_store_is_ok_and_read_whole(store):
    seen = []
    report = verify_store(store.path, lambda done, total, file: seen.append((done, total, file)))
    assert report.ok
    assert (report.records, report.tensors) == (8, 2)
    assert report.bytes_read == store.geometry.expert_bytes + store.manifest.dense_bytes + 3
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert report.to_table()["ok"] is True


def test_all_problems_are_listed_with_their_place(store):
    first, second = store.location(0, 3), store.location(1, 2)
    damage(first.path, first.offset)
    damage(second.path, second.offset + second.nbytes - 1)
    tensor = store.dense_info("b")
    damage(store.path / "dense-00001.safetensors", tensor.offset + 5)
    (store.path / "config.json").write_text("[]")
    problems = verify_store(store.path).problems
    found = [(p.file, p.layer, p.expert, p.tensor, p.offset) for p in problems]
    assert found == [
        (first.path.name, 0, 3, None, first.offset),
        (second.path.name, 1, 2, None, second.offset),
        ("dense-00001.safetensors", None, None, "b", tensor.offset),
        ("config.json", None, None, None, None),
    ]
    assert "layer 1 expert 2" in str(problems[1])


def test_a_truncated_and_a_missing_shard_are_both_reported(store):
    cut, gone = store.shard_paths[0], store.shard_paths[1]
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size - 10)
    gone.unlink()
    report = verify_store(store.path)
    assert {problem.file for problem in report.problems} == {cut.name, gone.name}
    assert any("10 bytes are missing" in problem.reason for problem in report.problems)


def test_a_damaged_index_is_a_problem_and_no_crash(store):
    damage(store.path / "experts.npy", 200)
    report = verify_store(store.path)
    assert not report.ok
    assert "experts.npy" in report.problems[0].reason


def test_what_is_no_store_is_refused(tmp_path):
    with pytest.raises(UsageError, match="not a store"):
        verify_store(tmp_path)

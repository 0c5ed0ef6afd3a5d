"""Synthetic stores: patterns that betray a wrong byte, finite random weights, and clear refusals."""

from __future__ import annotations

import numpy as np
import pytest

from tierd.errors import UsageError
from tierd.store.formats import ExpertFormat
from tierd.store.synthetic import expected_record, make_store


def test_pattern_records_differ_in_almost_every_byte(tmp_path):
    store = make_store(tmp_path / "s", layers=2, experts=3, top_k=1, fill="pattern")
    records = [
        np.frombuffer(expected_record(store.manifest, layer, expert), np.uint8)
        for layer in range(2)
        for expert in range(3)
    ]
    for first in range(6):
        assert np.mean(records[first] == np.roll(records[first], 4096)) < 0.01
        for second in range(first):
            assert np.mean(records[first] == records[second]) < 0.01


@pytest.mark.parametrize("expert_format", list(ExpertFormat))
def test_random_weights_are_finite_and_repeat_by_seed(tmp_path, expert_format):
    def make(name, seed):
        return make_store(tmp_path / name, layers=1, experts=2, top_k=1, format=expert_format, seed=seed)

    first, again, other = make("a", 5), make("b", 5), make("c", 6)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    views = first.layout(0).views(first.read_record(0, 1))
    for view in views.values():
        values = view
        if view.dtype == np.uint16:
            values = (view.astype(np.uint32) << 16).view(np.float32)
        assert np.isfinite(values.astype(np.float64)).all()
        assert view.any()


def test_layers_may_have_their_own_record_sizes(tmp_path):
    store = make_store(
        tmp_path / "s", layers=[4, 7], experts=[2, 3], top_k=1, fill="pattern", record_bytes=[1 << 15, 1 << 16]
    )
    assert [store.location(4, 0).nbytes, store.location(7, 2).nbytes] == [1 << 15, 1 << 16]
    assert store.geometry.slot_bytes == 1 << 16
    assert store.read_record(7, 2).tobytes() == expected_record(store.manifest, 7, 2)


def test_shards_are_cut_at_the_limit(tmp_path):
    store = make_store(
        tmp_path / "s", layers=1, experts=5, top_k=1, fill="pattern", record_bytes=1 << 15, shard_bytes=1 << 16
    )
    assert [path.name for path in store.shard_paths] == [f"experts-0000{n}.safetensors" for n in (1, 2, 3)]
    assert store.index["shard"].tolist() == [0, 0, 1, 1, 2]


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(UsageError, match="unknown fill"):
        make_store(tmp_path / "s", layers=1, experts=2, top_k=1, fill="nonsense")
    with pytest.raises(UsageError, match="2 layers, but 3"):
        make_store(tmp_path / "s", layers=2, experts=[1, 2, 3], top_k=1)
    make_store(tmp_path / "s", layers=1, experts=2, top_k=1)
    with pytest.raises(UsageError, match="not empty"):
        make_store(tmp_path / "s", layers=1, experts=2, top_k=1)

"""Opening a store: everything is checked at once, and every damage is named."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tierd.errors import ChecksumMismatch, DriveError, LimitExceeded, StoreDamaged, UsageError
from tierd.store.manifest import MANIFEST_FILE, Manifest, compute_fingerprint
from tierd.store.store import ExpertStore
from tierd.store.synthetic import expected_record, make_store

CONFIG = {"model_type": "toy", "hidden_size": 64}


@pytest.fixture
def store(tmp_path):
    generator = np.random.default_rng(0)
    return make_store(
        tmp_path / "store",
        layers=[0, 2],
        experts=[3, 4],
        top_k=2,
        fill="pattern",
        shard_bytes=40_000,
        dense={
            "embed": generator.standard_normal((5, 7)).astype(np.float32),
            "norm": np.arange(9, dtype=np.uint16),
        },
        config=CONFIG,
    )


def rewrite_manifest(store, **changes):
    """Writes the manifest with other fields and a fingerprint that fits them."""
    table = json.loads((store.path / MANIFEST_FILE).read_text()) | changes
    manifest = Manifest.model_validate(table)
    signed = manifest.model_copy(update={"fingerprint": compute_fingerprint(manifest)})
    (store.path / MANIFEST_FILE).write_text(signed.to_json())


def test_records_dense_tensors_and_files_are_read_back(store):
    for layer, experts in ((0, 3), (2, 4)):
        for expert in range(experts):
            record = store.read_record(layer, expert)
            assert record.tobytes() == expected_record(store.manifest, layer, expert)
            assert record.ctypes.data % 4096 == 0
            place = store.location(layer, expert)
            with place.path.open("rb") as file:
                file.seek(place.offset)
                assert file.read(place.nbytes) == record.tobytes()
    assert store.dense_names() == ["embed", "norm"]
    assert store.read_dense("norm").data.tolist() == list(range(9))
    assert store.read_dense("embed").data.shape == (5, 7)
    assert json.loads(store.read_file("config.json")) == CONFIG


def test_repr_tells_what_the_store_holds(store):
    assert "2 layers, 7 experts" in repr(store)
    assert store.fingerprint[:12] in repr(store)


def test_a_store_of_real_size_opens_from_sparse_shards(tmp_path):
    made = make_store(
        tmp_path / "big",
        layers=76,
        experts=256,
        top_k=8,
        hidden=6144,
        intermediate=2048,
        format="int4-g64",
        fill="sparse",
    )
    assert made.geometry.experts_total == 19_456
    assert made.geometry.expert_bytes > 380e9
    assert sum(path.stat().st_blocks * 512 for path in made.path.iterdir()) < 20e6
    assert not made.read_record(75, 255).any()


@pytest.mark.parametrize("cut", [1, 2048, 20_000])
def test_a_truncated_shard_is_refused_with_the_missing_bytes(store, cut):
    path = store.shard_paths[1]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    with pytest.raises(StoreDamaged, match=rf"{path.name}: {cut} bytes are missing"):
        ExpertStore.open(store.path)


def test_a_longer_shard_is_refused(store):
    with store.shard_paths[0].open("ab") as file:
        file.write(b"x")
    with pytest.raises(StoreDamaged, match="1 bytes too many"):
        ExpertStore.open(store.path)


@pytest.mark.parametrize("name", ["experts-00002.safetensors", "dense-00001.safetensors", "experts.npy", "config.json"])
def test_a_missing_file_is_named(store, name):
    (store.path / name).unlink()
    with pytest.raises(StoreDamaged, match=name):
        ExpertStore.open(store.path)


def test_a_changed_shard_header_is_refused(store):
    path = store.shard_paths[0]
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreDamaged, match="header is not the one"):
        ExpertStore.open(store.path)


def test_a_changed_index_is_refused(store):
    path = store.path / "experts.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreDamaged, match=r"experts\.npy"):
        ExpertStore.open(store.path)


def test_a_wrong_byte_in_a_record_is_found_when_it_is_read(store):
    place = store.location(2, 1)
    with place.path.open("r+b") as file:
        file.seek(place.offset + 777)
        byte = file.read(1)[0]
        file.seek(place.offset + 777)
        file.write(bytes([byte ^ 0x10]))
    with pytest.raises(ChecksumMismatch, match="layer 2 expert 1") as caught:
        store.read_record(2, 1)
    assert (caught.value.path, caught.value.offset) == (str(place.path), place.offset)
    store.read_record(2, 0)


def test_a_wrong_byte_in_a_dense_tensor_is_found_when_it_is_read(store):
    info = store.dense_info("norm")
    path = store.path / "dense-00001.safetensors"
    with path.open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\xff")
    with pytest.raises(ChecksumMismatch, match="tensor norm") as caught:
        store.read_dense("norm")
    assert caught.value.offset == info.offset


def test_a_shard_cut_after_opening_is_an_error_and_never_zeros(store):
    place = store.location(0, 2)
    with place.path.open("r+b") as file:
        file.truncate(place.offset + 100)
    with pytest.raises(DriveError, match="the file ends") as caught:
        store.read_record(0, 2)
    assert caught.value.offset == place.offset


def test_only_listed_files_are_opened(store):
    (store.path / "secret.txt").write_text("no")
    for name in ("secret.txt", "../store/config.json", "/etc/passwd", "store.json", ""):
        with pytest.raises(LimitExceeded, match="no file"):
            store.read_file(name)


def test_a_changed_text_file_is_found_when_it_is_read(store):
    path = store.path / "config.json"
    path.write_bytes(path.read_bytes().replace(b"toy", b"tay"))
    with pytest.raises(StoreDamaged, match="changed after conversion"):
        store.read_file("config.json")


def test_unknown_names_and_numbers_are_refused(store):
    with pytest.raises(LimitExceeded, match="no dense tensor 'head'"):
        store.read_dense("head")
    with pytest.raises(LimitExceeded, match="layer 1"):
        store.location(1, 0)
    with pytest.raises(LimitExceeded, match="expert 4"):
        store.read_record(2, 4)


@pytest.mark.parametrize(
    "change",
    [
        {"family": "other"},
        {"dense_format": "int8"},
        {"format_version": 1, "model_type": "other"},
    ],
)
def test_the_fingerprint_covers_the_manifest(store, change):
    path = store.path / MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StoreDamaged, match="fingerprint"):
        ExpertStore.open(store.path)


def test_the_fingerprint_depends_on_weights_and_config(tmp_path):
    def fingerprint(name, **options):
        arguments = {"layers": 1, "experts": 2, "top_k": 1, "seed": 1, "config": CONFIG} | options
        return make_store(tmp_path / name, **arguments).fingerprint

    first = fingerprint("a")
    assert fingerprint("b") == first
    assert fingerprint("c", seed=2) != first
    assert fingerprint("d", config=CONFIG | {"rope_theta": 1.0}) != first
    assert fingerprint("e", format="f32") != first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shards": []}, "experts.npy"),
        ({"shards": [{"file": "../x", "bytes": 1, "header_bytes": 1, "header_sha256": "0" * 64}]}, "shards.0.file"),
        ({"dense": [{"name": "a"}]}, "dense.0"),
        ({"unknown": 1}, "unknown"),
        ({"geometry": None}, "geometry"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_by_field(store, change, message):
    path = store.path / MANIFEST_FILE
    try:
        rewrite_manifest(store, **change)
    except ValueError:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(StoreDamaged, match=message):
        ExpertStore.open(store.path)


def test_dense_tensors_that_overlap_are_refused(store):
    dense = json.loads((store.path / MANIFEST_FILE).read_text())["dense"]
    dense[1]["offset"] -= 4
    rewrite_manifest(store, dense=dense)
    with pytest.raises(StoreDamaged, match="dense tensor"):
        ExpertStore.open(store.path)


def test_another_format_version_is_told_apart(store):
    path = store.path / MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 3}))
    with pytest.raises(UsageError, match="store format 3"):
        ExpertStore.open(store.path)


def test_what_is_no_store_is_refused_with_advice(tmp_path):
    with pytest.raises(UsageError, match="not a directory"):
        ExpertStore.open(tmp_path / "nothing")
    with pytest.raises(UsageError, match="tierd convert"):
        ExpertStore.open(tmp_path)
    (tmp_path / MANIFEST_FILE).write_text("{")
    with pytest.raises(StoreDamaged, match="not JSON"):
        ExpertStore.open(tmp_path)
    (tmp_path / MANIFEST_FILE).write_text("[]")
    with pytest.raises(StoreDamaged, match=r"store\.json"):
        ExpertStore.open(tmp_path)

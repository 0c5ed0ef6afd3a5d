"""Finding a checkpoint's files: single, several, with and without index, links, and every way to be incomplete."""

from __future__ import annotations

import json
import shutil

import pytest

from tierd.checkpoint.reader import Checkpoint
from tierd.checkpoint.synthetic import make_checkpoint
from tierd.errors import StoreDamaged, UsageError

CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "vocab_size": 10,
}


@pytest.mark.parametrize(("shards", "index"), [(1, False), (3, True), (3, False)])
def test_all_tensors_are_found(tmp_path, shards, index):
    weights = make_checkpoint(tmp_path / "m", CONFIG, shards=shards, index=index)
    checkpoint = Checkpoint.open(tmp_path / "m")
    assert set(checkpoint.tensors) == set(weights)
    assert len(checkpoint.headers) == shards
    assert checkpoint.remarks == []


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("lost", [1, 3])
def test_a_missing_shard_is_named_as_an_incomplete_download(tmp_path, index, lost):
    make_checkpoint(tmp_path / "m", CONFIG, shards=3, index=index)
    (tmp_path / "m" / f"model-0000{lost}-of-00003.safetensors").unlink()
    with pytest.raises(StoreDamaged, match=rf"model-0000{lost}-of-00003\.safetensors") as caught:
        Checkpoint.open(tmp_path / "m")
    assert "incomplete download" in caught.value.hint


@pytest.mark.parametrize("suffix", [".incomplete", ".part"])
def test_an_unfinished_download_is_named(tmp_path, suffix):
    make_checkpoint(tmp_path / "m", CONFIG, shards=2)
    path = tmp_path / "m" / "model-00002-of-00002.safetensors"
    path.rename(path.with_name(path.name + suffix))
    with pytest.raises(StoreDamaged, match="model-00002") as caught:
        Checkpoint.open(tmp_path / "m")
    assert f"model-00002-of-00002.safetensors{suffix}" in caught.value.hint


def test_an_unfinished_download_beside_a_complete_checkpoint_is_a_remark(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG)
    download = tmp_path / "m" / ".cache" / "huggingface" / "download"
    download.mkdir(parents=True)
    (download / "abc.incomplete").touch()
    assert Checkpoint.open(tmp_path / "m").remarks == ["unfinished download left in the folder: abc.incomplete"]


def test_tensors_that_the_index_promises_are_counted_and_named(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG, shards=2)
    path = tmp_path / "m" / "model.safetensors.index.json"
    table = json.loads(path.read_text())
    table["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(table))
    with pytest.raises(StoreDamaged, match=r"indexed 29 tensors from 2 files, 1 missing: model\.extra\.weight"):
        Checkpoint.open(tmp_path / "m")


@pytest.mark.parametrize("cut", [1, 4096])
def test_a_truncated_shard_is_refused_with_the_missing_bytes(tmp_path, cut):
    make_checkpoint(tmp_path / "m", CONFIG)
    path = tmp_path / "m" / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    with pytest.raises(StoreDamaged, match=rf"model\.safetensors: {cut} bytes are missing"):
        Checkpoint.open(tmp_path / "m")


def test_links_into_a_cache_are_followed_and_a_dangling_one_is_named(tmp_path):
    make_checkpoint(tmp_path / "plain", CONFIG, shards=2)
    snapshot, blobs = tmp_path / "models" / "snapshots" / "abc", tmp_path / "models" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted((tmp_path / "plain").iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    plain, linked = Checkpoint.open(tmp_path / "plain"), Checkpoint.open(snapshot)
    assert {n: (t.dtype, t.shape, t.offset) for n, t in plain.tensors.items()} == {
        n: (t.dtype, t.shape, t.offset) for n, t in linked.tensors.items()
    }
    target = (snapshot / "model-00002-of-00002.safetensors").readlink()
    (blobs / target.name).unlink()
    (blobs / "x.incomplete").touch()
    with pytest.raises(StoreDamaged, match=rf"model-00002-of-00002.safetensors is a link to ../../blobs/{target.name}"):
        Checkpoint.open(snapshot)


def test_the_same_tensor_in_two_files_is_refused(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG)
    shutil.copy(tmp_path / "m" / "model.safetensors", tmp_path / "m" / "model-copy.safetensors")
    with pytest.raises(StoreDamaged, match=r"is also in model-copy\.safetensors"):
        Checkpoint.open(tmp_path / "m")


def test_a_consolidated_copy_beside_the_model_is_not_read(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG)
    shutil.copy(tmp_path / "m" / "model.safetensors", tmp_path / "m" / "consolidated.safetensors")
    assert list(Checkpoint.open(tmp_path / "m").headers) == ["model.safetensors"]


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": 5}}'],
)
def test_an_odd_index_file_is_refused(tmp_path, content):
    make_checkpoint(tmp_path / "m", CONFIG)
    (tmp_path / "m" / "model.safetensors.index.json").write_text(content)
    with pytest.raises(StoreDamaged, match=r"model\.safetensors\.index\.json"):
        Checkpoint.open(tmp_path / "m")


def test_folders_that_are_no_checkpoint_are_refused_with_advice(tmp_path):
    with pytest.raises(UsageError, match="not a directory"):
        Checkpoint.open(tmp_path / "nothing")
    with pytest.raises(StoreDamaged, match=r"config\.json is missing"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UsageError, match="no safetensors files"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UsageError) as caught:
        Checkpoint.open(tmp_path)
    assert "only safetensors" in caught.value.hint
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(StoreDamaged, match="not JSON"):
        Checkpoint.open(tmp_path)

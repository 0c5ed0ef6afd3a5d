"""Conversion from end to end: the same store from every form of a checkpoint, whenever it was killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from tierd.checkpoint import convert as converting
from tierd.checkpoint import destination, encode
from tierd.checkpoint.convert import Conversion, convert
from tierd.checkpoint.quantise import bf16_to_f32, dequantise_int4, dequantise_int8
from tierd.checkpoint.synthetic import make_checkpoint
from tierd.errors import ChecksumMismatch, DriveError, LimitExceeded, StoreDamaged, UnsupportedModel, UsageError
from tierd.store import writing
from tierd.store.store import ExpertStore
from tierd.store.verification import verify_store

ORACLES = Path(__file__).parent.parent / "oracles"
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "vocab_size": 50,
    "mlp_only_layers": [1],
}
SMALL_SHARDS = 8192


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def expert_matrices(store, layer, expert):
    views = store.layout(layer).views(store.read_record(layer, expert))
    matrices = {}
    for name in ("gate", "up", "down"):
        match store.manifest.expert_format:
            case "f32":
                matrices[name] = views[name]
            case "bf16":
                matrices[name] = bf16_to_f32(views[name])
            case "int8":
                matrices[name] = dequantise_int8(views[name], views[f"{name}.scales"])
            case _:
                cols = store.geometry.hidden_size if name != "down" else store.geometry.intermediate_size
                matrices[name] = dequantise_int4(views[name], views[f"{name}.scales"], cols)
    return matrices


def dense_matrix(store, name):
    tensor = store.read_dense(name)
    match tensor.dtype:
        case "f32":
            return tensor.data
        case "bf16":
            return bf16_to_f32(tensor.data)
        case _:
            return dequantise_int8(tensor.data, tensor.scales)


def in_child(function, *arguments):
    """Runs a function in a forked process; returns its exit code (negative: the signal that ended it)."""
    child = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    child.start()
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode


@pytest.mark.parametrize(
    ("experts", "dense", "expert_error", "dense_error"),
    [
        ("native", "native", 0, 0),
        ("bf16", "bf16", 2**-8, 2**-8),
        ("int8", "int8", 0.0041, 0.0041),
        ("int4-g64", "f32", 0.14, 0),
    ],
)
def test_every_weight_arrives_in_every_format(tmp_path, experts, dense, expert_error, dense_error):
    weights = make_checkpoint(tmp_path / "m", CONFIG, dtype="F32", shards=2)
    report = convert(tmp_path / "m", tmp_path / "s", experts=experts, dense=dense, shard_bytes=SMALL_SHARDS)
    store = ExpertStore.open(tmp_path / "s")
    assert (store.fingerprint, store.manifest.family) == (report.fingerprint, "qwen3_moe")
    assert [layer.layer for layer in store.geometry.layers] == [0, 2]
    assert report.bytes_per_weight == store.geometry.layouts[0].bytes_per_weight
    seen = set()
    for layer in (0, 2):
        for expert in range(6):
            for name, matrix in expert_matrices(store, layer, expert).items():
                published = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
                seen.add(published)
                error = np.abs(matrix - weights[published]).max()
                assert error <= expert_error * np.abs(weights[published]).max()
    for name in store.dense_names():
        seen.add(name)
        assert np.abs(dense_matrix(store, name) - weights[name]).max() <= dense_error * np.abs(weights[name]).max()
    assert seen == set(weights)
    assert verify_store(tmp_path / "s").ok
    assert not [path.name for path in (tmp_path / "s").iterdir() if "conversion" in path.name]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_native_keeps_every_bit_of_every_source_type(tmp_path, dtype):
    weights = make_checkpoint(tmp_path / "m", CONFIG, dtype=dtype)
    convert(tmp_path / "m", tmp_path / "s")
    store = ExpertStore.open(tmp_path / "s")
    assert store.manifest.expert_format == ("bf16" if dtype == "BF16" else "f32")
    for name in store.dense_names():
        assert np.array_equal(dense_matrix(store, name), weights[name])
    for name, matrix in expert_matrices(store, 2, 5).items():
        assert np.array_equal(matrix, weights[f"model.layers.2.mlp.experts.5.{name}_proj.weight"])


def test_the_form_of_the_checkpoint_does_not_matter(tmp_path):
    make_checkpoint(tmp_path / "single", CONFIG)
    make_checkpoint(tmp_path / "indexed", CONFIG, shards=4)
    make_checkpoint(tmp_path / "bare", CONFIG, shards=4, index=False)
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in (tmp_path / "indexed").iterdir():
        (linked / path.name).symlink_to(f"../indexed/{path.name}")
    stores = []
    for name in ("single", "indexed", "bare", "linked"):
        convert(tmp_path / name, tmp_path / f"store-{name}", experts="int8", dense="int8", shard_bytes=SMALL_SHARDS)
        stores.append(contents(tmp_path / f"store-{name}"))
    assert stores[0] == stores[1] == stores[2] == stores[3]
    assert all(not path.is_symlink() for path in (tmp_path / "store-linked").iterdir())


def test_stacked_experts_give_the_same_records(tmp_path):
    weights = make_checkpoint(tmp_path / "m", CONFIG, stacked_layers=[0])
    convert(tmp_path / "m", tmp_path / "s")
    store = ExpertStore.open(tmp_path / "s")
    gate_up = weights["model.layers.0.mlp.experts.gate_up_proj"]
    for expert in range(6):
        found = expert_matrices(store, 0, expert)
        assert np.array_equal(found["gate"], gate_up[expert, :16])
        assert np.array_equal(found["up"], gate_up[expert, 16:])
        assert np.array_equal(found["down"], weights["model.layers.0.mlp.experts.down_proj"][expert])


def test_windows_of_rows_do_not_change_dense_tensors(tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "m", CONFIG, dtype="F32")
    convert(tmp_path / "m", tmp_path / "whole", dense="int8")
    monkeypatch.setattr(encode, "WINDOW_WEIGHTS", 100)
    convert(tmp_path / "m", tmp_path / "windows", dense="int8")
    assert contents(tmp_path / "whole") == contents(tmp_path / "windows")


@pytest.mark.parametrize(
    "folder", ["olmoe", "mixtral", "qwen3_moe", "mixtral_f16", "qwen3_moe_shards", "qwen3_moe_tied"]
)
def test_checkpoints_written_by_transformers_convert(tmp_path, folder):
    convert(ORACLES / folder, tmp_path / "s")
    store = ExpertStore.open(tmp_path / "s")
    assert store.manifest.model_type == json.loads((ORACLES / folder / "config.json").read_text())["model_type"]
    assert store.read_file("config.json") == (ORACLES / folder / "config.json").read_bytes()


def count_reports(source, target):
    reports = []
    convert(source, target, experts="int4-g64", shard_bytes=SMALL_SHARDS, progress=reports.append)
    return len(reports)


def convert_and_die(source, target, moment, *, consume=False):
    """Converts and kills itself without warning at the given moment."""

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    reports = 0

    def report(_):
        nonlocal reports
        reports += 1
        if reports == moment:
            die()

    if moment == "before the identity":
        converting.write_identity = die
    elif moment == "before the journal":
        converting.Journal.finish_shard = die
    elif moment == "before the rename":
        writing.sync_directory = die
    elif moment == "before the manifest":
        converting.seal_store = die
    elif moment == "before the end":
        converting.Journal.remove = die
    convert(source, target, experts="int4-g64", shard_bytes=SMALL_SHARDS, consume=consume, progress=report)


@pytest.mark.parametrize("consume", [False, True])
def test_killed_at_any_moment_it_goes_on_to_the_same_store(tmp_path, consume):
    make_checkpoint(tmp_path / "m", CONFIG, shards=3)
    total = count_reports(tmp_path / "m", tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    named = [f"before the {what}" for what in ("identity", "journal", "rename", "manifest", "end")]
    for moment in [*named, *range(1, total + 1, 3)]:
        source, target = tmp_path / f"source-{moment}", tmp_path / f"store-{moment}"
        shutil.copytree(tmp_path / "m", source)
        code = in_child(lambda s, t, m: convert_and_die(s, t, m, consume=consume), source, target, moment)
        assert code == -signal.SIGKILL
        if moment != "before the end":
            with pytest.raises(UsageError, match=r"not a (store|directory)"):
                ExpertStore.open(target)
        convert(source, target, experts="int4-g64", shard_bytes=SMALL_SHARDS, consume=consume)
        assert contents(target) == expected
        left = [path.name for path in source.iterdir() if path.name.endswith(".safetensors")]
        assert len(left) == (0 if consume else 3)


def test_killed_again_and_again_it_still_arrives(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG)
    convert(tmp_path / "m", tmp_path / "whole", experts="int4-g64", shard_bytes=SMALL_SHARDS)
    shards = len(Conversion.prepare(tmp_path / "m", tmp_path / "s", shard_bytes=SMALL_SHARDS).plan.shards)
    for attempt in range(10 * shards):
        if in_child(convert_and_die, tmp_path / "m", tmp_path / "s", 9 + attempt) == 0:
            break
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")


def test_resumed_shards_are_not_written_again(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG)
    assert in_child(convert_and_die, tmp_path / "m", tmp_path / "s", "before the manifest") == -signal.SIGKILL
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "s").glob("*.safetensors")}
    report = convert(tmp_path / "m", tmp_path / "s", experts="int4-g64", shard_bytes=SMALL_SHARDS)
    assert report.resumed_shards == len(before)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "s").glob("*.safetensors")} == before


def test_a_finished_shard_that_was_damaged_meanwhile_is_written_again(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG)
    convert(tmp_path / "m", tmp_path / "whole", experts="int4-g64", shard_bytes=SMALL_SHARDS)
    in_child(convert_and_die, tmp_path / "m", tmp_path / "s", "before the manifest")
    with (tmp_path / "s" / "experts-00001.safetensors").open("r+b") as file:
        file.truncate(5000)
    convert(tmp_path / "m", tmp_path / "s", experts="int4-g64", shard_bytes=SMALL_SHARDS)
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")


def test_a_torn_line_of_the_journal_is_ignored(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG)
    convert(tmp_path / "m", tmp_path / "whole", experts="int4-g64", shard_bytes=SMALL_SHARDS)
    in_child(convert_and_die, tmp_path / "m", tmp_path / "s", "before the manifest")
    log = tmp_path / "s" / "conversion.log"
    log.write_bytes(log.read_bytes()[:-7])
    convert(tmp_path / "m", tmp_path / "s", experts="int4-g64", shard_bytes=SMALL_SHARDS)
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")


def test_going_on_with_other_options_is_refused(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG)
    in_child(convert_and_die, tmp_path / "m", tmp_path / "s", 5)
    with pytest.raises(UsageError, match="used experts int4-g64, not int8"):
        convert(tmp_path / "m", tmp_path / "s", experts="int8", shard_bytes=SMALL_SHARDS)
    with pytest.raises(UsageError, match="used shard_bytes 8192, not 16384"):
        convert(tmp_path / "m", tmp_path / "s", experts="int4-g64", shard_bytes=16384)


@pytest.mark.parametrize("changed", ["model.safetensors", "config.json", "tokenizer.json"])
def test_going_on_with_a_changed_source_is_refused(tmp_path, changed):
    make_checkpoint(tmp_path / "m", CONFIG)
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    in_child(convert_and_die, tmp_path / "m", tmp_path / "s", 5)
    path = tmp_path / "m" / changed
    if changed == "model.safetensors":  # another model of the same shape: the same header, the same length
        shutil.rmtree(tmp_path / "m")
        make_checkpoint(tmp_path / "m", CONFIG, seed=1)
        (tmp_path / "m" / "tokenizer.json").write_text("{}")
    else:
        path.write_text(path.read_text().replace("}", " }"))
    with pytest.raises(UsageError, match=rf"{changed} was changed"):
        convert(tmp_path / "m", tmp_path / "s", experts="int4-g64", shard_bytes=SMALL_SHARDS)


def test_two_conversions_into_one_directory_do_not_mix(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG)
    first = Conversion.prepare(tmp_path / "m", tmp_path / "s")
    second = Conversion.prepare(tmp_path / "m", tmp_path / "s")

    def start_second(_):
        with pytest.raises(UsageError, match="another conversion"):
            second.run()

    first.run(start_second)
    assert verify_store(tmp_path / "s").ok


def test_other_content_in_the_destination_is_never_touched(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"not empty \(it has thesis\.txt\)"):
        convert(tmp_path / "m", tmp_path / "s")
    assert contents(tmp_path / "s") == {"thesis.txt": b"mine"}
    with pytest.raises(UsageError, match="not empty"):
        convert(tmp_path / "m", tmp_path / "m")
    with pytest.raises(UsageError, match="not a directory"):
        convert(tmp_path / "m", tmp_path / "s" / "thesis.txt")
    convert(tmp_path / "m", tmp_path / "done")
    with pytest.raises(UsageError, match="already holds a store"):
        convert(tmp_path / "m", tmp_path / "done")


def test_a_refused_checkpoint_leaves_nothing_behind(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG)
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIG | {"model_type": "unheard_of"}))
    with pytest.raises(UnsupportedModel):
        convert(tmp_path / "m", tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_source_shards_are_freed_as_soon_as_all_they_hold_is_stored(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG, shards=4)
    (tmp_path / "m" / "README.md").write_text("kept")
    left = []

    def look(state):
        left.append((state.done_bytes, len(list((tmp_path / "m").glob("*.safetensors")))))

    report = convert(tmp_path / "m", tmp_path / "s", consume=True, shard_bytes=SMALL_SHARDS, progress=look)
    counts = [count for _, count in left]
    assert counts[0] == 4
    assert {3, 2, 1} & set(counts)
    assert len(report.freed) == 4
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors.index.json",
    ]
    assert verify_store(tmp_path / "s").ok


def test_links_are_freed_with_their_targets(tmp_path):
    make_checkpoint(tmp_path / "blobs", CONFIG)
    (tmp_path / "m").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "m" / path.name).symlink_to(path)
    convert(tmp_path / "m", tmp_path / "s", consume=True)
    assert not (tmp_path / "blobs" / "model.safetensors").exists()
    assert not (tmp_path / "m" / "model.safetensors").is_symlink()


def test_a_lost_shard_whose_source_was_freed_is_an_error(tmp_path):
    make_checkpoint(tmp_path / "m", CONFIG)
    code = in_child(lambda: convert_and_die(tmp_path / "m", tmp_path / "s", "before the manifest", consume=True))
    assert code == -signal.SIGKILL
    (tmp_path / "s" / "experts-00002.safetensors").unlink()
    with pytest.raises(StoreDamaged, match=r"experts-00002\.safetensors is gone, and so is its source"):
        convert(tmp_path / "m", tmp_path / "s", experts="int4-g64", shard_bytes=SMALL_SHARDS, consume=True)


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

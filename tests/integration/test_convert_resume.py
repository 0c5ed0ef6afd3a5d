"""A conversion that was killed goes on to the same store, and frees only what is stored."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
from conversions import CONFIG, SMALL_SHARDS, contents, in_child

from tierd.checkpoint import convert as converting
from tierd.checkpoint.convert import Conversion, convert
from tierd.checkpoint.synthetic import make_checkpoint
from tierd.errors import StoreDamaged, UsageError
from tierd.store import writing
from tierd.store.store import ExpertStore
from tierd.store.verification import verify_store


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
    for moment in [*named, *range(1, total + 1, -(-total // 8))]:
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

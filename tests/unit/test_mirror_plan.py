"""Which files go to a mirror: hottest first, never beyond the budget; and the bound on the rate of copying."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import UsageError
from tierd.mirror.history import read_uses
from tierd.mirror.pace import Pace
from tierd.mirror.plan import FileKind, MirrorFile, mirror_files, plan_mirror
from tierd.store.synthetic import make_store

RECORD = 8192


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Four shards of two experts each, and a dense one."""
    return make_store(
        tmp_path_factory.mktemp("plan") / "s", layers=2, experts=4, top_k=1, hidden=16, intermediate=8,
        record_bytes=RECORD, shard_bytes=2 * RECORD, dense={"d": np.ones(1000, np.float32)}, config={"a": 1},
    )  # fmt: skip


def names(files):
    return [file.name for file in files if file.kind is FileKind.EXPERTS]


def test_without_history_shards_keep_their_order_behind_the_small_files(store):
    files = mirror_files(store.manifest, store.index)
    assert [file.kind for file in files] == ["text"] * 3 + ["experts"] * 4 + ["dense"]
    assert names(files) == [shard.file for shard in store.manifest.shards]
    listed = {file.name for file in files}
    assert listed == {path.name for path in store.path.iterdir()}
    assert all(file.nbytes == (store.path / file.name).stat().st_size for file in files if file.name != "store.json")


def test_hottest_shards_come_first(store):
    uses = np.zeros(8)
    uses[[6, 2, 3]] = [9, 4, 4]
    files = mirror_files(store.manifest, store.index, uses)
    assert names(files) == [f"experts-0000{n}.safetensors" for n in (4, 2, 1, 3)]
    plan = plan_mirror(files, budget=None, room=sum(file.nbytes for file in files[:4]))
    assert names(plan.files) == ["experts-00004.safetensors"]
    assert plan.share_of_uses == pytest.approx(9 / 17)
    assert plan.partial


def test_heat_counts_per_byte():
    large = MirrorFile("large", 100, FileKind.EXPERTS, 10)
    small = MirrorFile("small", 20, FileKind.EXPERTS, 9)
    plan = plan_mirror([small, large], budget=None, room=100)
    assert [file.name for file in plan.files] == ["small"]
    assert plan.share_of_uses == pytest.approx(9 / 19)


@given(
    sizes=st.lists(st.integers(0, 1000), max_size=20),
    budget=st.none() | st.integers(0, 5000),
    room=st.integers(0, 5000),
)
def test_a_plan_never_exceeds_budget_or_room_and_loses_no_file(sizes, budget, room):
    files = [MirrorFile(str(n), size, FileKind.EXPERTS) for n, size in enumerate(sizes)]
    plan = plan_mirror(files, budget=budget, room=room)
    bound = room if budget is None else min(room, budget)
    assert plan.nbytes <= bound
    assert sorted(int(file.name) for file in (*plan.files, *plan.left_out)) == list(range(len(sizes)))
    assert all(plan.nbytes + file.nbytes > bound for file in plan.left_out)
    assert plan.share_of_uses is None


@pytest.mark.parametrize("uses", [np.zeros(7), np.zeros((8, 1)), np.full(8, np.nan), np.full(8, -1.0)])
def test_a_history_that_does_not_fit_is_refused(store, uses):
    with pytest.raises(UsageError, match="no list of 8 counts"):
        mirror_files(store.manifest, store.index, uses)


def test_histories_are_read_from_numpy_and_json_files(tmp_path):
    counts = [3, 0, 5]
    np.save(tmp_path / "h.npy", np.array(counts, np.uint32))
    (tmp_path / "list.json").write_text(json.dumps(counts))
    (tmp_path / "table.json").write_text(json.dumps({"fingerprint": "f", "counts": counts}))
    for name in ("h.npy", "list.json", "table.json"):
        assert read_uses(tmp_path / name, "f").tolist() == counts
    with pytest.raises(UsageError, match="usage history of another store"):
        read_uses(tmp_path / "table.json", "g")


@pytest.mark.parametrize("text", ["", "{}", '{"counts": {"a": 1}}', '["a"]', "[[1, 2], [3]]", "[" * 100_000])
def test_a_damaged_history_is_a_clear_error(tmp_path, text):
    (tmp_path / "h.json").write_text(text)
    with pytest.raises(UsageError, match=r"h\.json"):
        read_uses(tmp_path / "h.json", "f")


def test_a_pickled_history_is_refused(tmp_path):
    np.save(tmp_path / "h.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(UsageError, match=r"h\.npy"):
        read_uses(tmp_path / "h.npy", "f")


class Time:
    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds


def test_pace_keeps_the_rate_and_saves_up_no_idle_time():
    time = Time()
    pace = Pace(1000, clock=lambda: time.now, sleep=time.sleep)
    for _ in range(10):
        pace(500)
    assert time.now == pytest.approx(5.0)
    time.now += 60
    for _ in range(10):
        pace(500)
    assert time.now == pytest.approx(70.0, abs=0.11)


def test_without_a_rate_nobody_waits():
    Pace(None, clock=lambda: 0.0, sleep=lambda _: pytest.fail("slept"))(1 << 40)


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_that_lets_nothing_through_is_refused(rate):
    with pytest.raises(UsageError):
        Pace(rate)

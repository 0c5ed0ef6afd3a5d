from __future__ import annotations

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.client.in_process import InProcess
from tierd.client.source import ExpertSource, Phase
from tierd.errors import ChecksumMismatch, LimitExceeded, UsageError
from tierd.store.store import ExpertStore
from tierd.store.synthetic import expected_record, make_store

LAYERS, EXPERTS = 3, 6


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(
        tmp_path_factory.mktemp("pattern") / "store", layers=LAYERS, experts=EXPERTS, top_k=2, fill="pattern"
    )


def visit(source, layer, experts):
    """The experts in the order in which they were used; their bytes are checked."""
    order = []

    def use(expert, address):
        order.append(expert)
        expected = expected_record(source.store.manifest, layer, expert)
        assert ctypes.string_at(address, len(expected)) == expected

    source.visit(layer, experts, use, step=0, phase=Phase.DECODE)
    return order


def test_it_is_an_expert_source(store):
    assert isinstance(InProcess(store), ExpertSource)


def test_resident_experts_come_first_and_all_are_counted(store):
    source = InProcess(store)
    assert visit(source, 1, [4, 2]) == [4, 2]
    assert visit(source, 1, [0, 2, 5, 4]) == [2, 4, 0, 5]
    stats = source.stats
    assert (stats.requested, stats.visits) == (6, 2)
    assert stats.outcomes == {"hit": 2, "miss": 4, "joined": 0}
    assert stats.tiers == {"ram": 2, "drive": 4}
    assert stats.wait_seconds == pytest.approx(sum(stats.wait_by_outcome.values()))
    assert stats.wait_seconds > 0


def test_more_experts_than_fit_are_served_each_read_once(store):
    source = InProcess(store, budget=2 * store.geometry.slot_bytes)
    assert visit(source, 0, list(range(EXPERTS))) == list(range(EXPERTS))
    assert source.stats.outcomes["miss"] == EXPERTS
    assert source.resident_bytes == 2 * store.geometry.slot_bytes


def test_the_least_recently_used_expert_leaves(store):
    source = InProcess(store, budget=2 * store.geometry.slot_bytes)
    for experts in ([0], [1], [0], [2]):
        visit(source, 0, experts)
    hits = source.stats.outcomes["hit"]
    visit(source, 0, [0])
    assert source.stats.outcomes["hit"] == hits + 1
    visit(source, 0, [1])
    assert source.stats.outcomes["hit"] == hits + 1


@settings(max_examples=20)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, LAYERS - 1), st.lists(st.integers(0, EXPERTS - 1), unique=True)), max_size=12),
)
def test_any_history_stays_within_budget_and_adds_up(store, slots, visits):
    source = InProcess(store, budget=slots * store.geometry.slot_bytes)
    for layer, experts in visits:
        assert sorted(visit(source, layer, experts)) == sorted(experts)
        assert source.resident_bytes <= slots * store.geometry.slot_bytes
    stats = source.stats
    assert stats.requested == sum(stats.outcomes.values()) == sum(len(experts) for _, experts in visits)


def test_a_budget_below_one_expert_is_refused_with_the_needed_figure(store):
    with pytest.raises(UsageError, match=str(store.geometry.slot_bytes)):
        InProcess(store, budget=store.geometry.slot_bytes - 1)


def test_unknown_layers_and_experts_are_refused(store):
    source = InProcess(store)
    for layer, expert in ((LAYERS, 0), (0, EXPERTS), (0, -1)):
        with pytest.raises(LimitExceeded):
            visit(source, layer, [expert])


def test_a_flipped_byte_is_an_error_and_is_not_kept(tmp_path):
    path = tmp_path / "store"
    place = make_store(path, layers=1, experts=2, top_k=1, fill="pattern").location(0, 1)
    with place.path.open("r+b") as shard:
        shard.seek(place.offset + 100)
        byte = shard.read(1)
        shard.seek(place.offset + 100)
        shard.write(bytes([byte[0] ^ 1]))
    source = InProcess(ExpertStore.open(path))
    for _ in range(2):
        with pytest.raises(ChecksumMismatch, match="layer 0 expert 1"):
            visit(source, 0, [1])
    assert source.resident_bytes == 0
    assert visit(source, 0, [0]) == [0]


def test_close_gives_everything_back(store):
    source = InProcess(store)
    visit(source, 0, [0, 1])
    source.close()
    assert source.resident_bytes == 0

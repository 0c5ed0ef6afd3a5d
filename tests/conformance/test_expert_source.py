"""Every source of experts: the right bytes, each expert used once, all of it counted, nothing else noticeable."""

from __future__ import annotations

import ctypes

import pytest
from far import open_far, worker_here

from tierd.client.arena_source import ArenaSource
from tierd.client.in_process import InProcess
from tierd.client.source import ExpertSource, Phase
from tierd.errors import LimitExceeded
from tierd.store.synthetic import expected_record

LAYERS, EXPERTS = 4, 16


@pytest.fixture(scope="module")
def daemon(serve_module, pattern_store):
    return serve_module(pattern_store.path, "--arena", "25%")


@pytest.fixture(params=["in process", "arena", "messages", "bytes", "bytes of a few", "worker"])
def source(request, daemon, pattern_store, monkeypatch, tmp_path):
    monkeypatch.setattr("tierd.client.far.cache_directory", lambda: tmp_path)
    slot = pattern_store.geometry.slot_bytes
    with_worker = worker_here(pattern_store.path) if request.param == "worker" else None
    if request.param == "in process":
        made = InProcess(pattern_store, budget=16 * slot)
    elif request.param in ("arena", "messages"):
        made = ArenaSource(
            daemon.address, pattern_store, name="x", numerics="exact", kernel_path="none",
            messages=request.param == "messages",
        )  # fmt: skip
    elif with_worker is not None:
        worker = with_worker.__enter__()
        made = open_far(daemon.name, experts="worker", workers=(str(worker.address),), arena=str(16 * slot))
    else:
        made = open_far(daemon.name, arena=str((2 if "few" in request.param else 16) * slot))
    yield made
    made.close()
    if with_worker is not None:
        with_worker.__exit__(None, None, None)


def visit(source, layer, experts, *, step=0, phase=Phase.DECODE, meanwhile=None):
    """The experts in the order in which they were used; their bytes are checked."""
    order = []

    def use(expert, address):
        order.append(expert)
        expected = expected_record(source.store.manifest, layer, expert)
        assert ctypes.string_at(address, len(expected)) == expected

    source.visit(layer, experts, use, step=step, phase=phase, meanwhile=meanwhile)
    return order


def test_it_is_an_expert_source_of_the_store(source, pattern_store):
    assert isinstance(source, ExpertSource)
    assert source.store.fingerprint == pattern_store.fingerprint
    for name in ("a", "b"):
        assert source.store.read_dense(name).data.tobytes() == pattern_store.read_dense(name).data.tobytes()
    assert source.store.read_file("config.json") == pattern_store.read_file("config.json")


def test_every_expert_is_used_with_its_bytes_and_all_add_up(source):
    step = 0
    for phase in (Phase.PREFILL, Phase.DECODE):
        for layer in range(LAYERS):
            for experts in ([3, 1], [1, 15, 0], list(range(EXPERTS))):
                step += 1
                assert sorted(set(visit(source, layer, experts, step=step, phase=phase))) == sorted(experts)
    stats = source.stats
    assert stats.requested == 2 * LAYERS * (2 + 3 + EXPERTS)
    assert sum(stats.outcomes.values()) == sum(stats.tiers.values()) == stats.requested
    assert stats.visits == 2 * LAYERS * 3
    assert stats.wait_seconds >= 0


def test_free_time_is_offered_at_most_once(source):
    calls = []
    visit(source, 0, [1, 2, 3, 4], step=1, meanwhile=lambda: calls.append(1))
    assert len(calls) <= 1


def test_an_error_of_the_caller_ends_the_visit_and_nothing_else(source):
    def use(_expert, _address):
        raise KeyError

    for step in range(3):
        with pytest.raises(KeyError):
            source.visit(1, [1, 2, 3], use, step=step, phase=Phase.DECODE)
    assert set(visit(source, 1, [1, 2, 3], step=9)) == {1, 2, 3}


@pytest.mark.parametrize(("layer", "expert"), [(LAYERS, 0), (0, EXPERTS), (0, -1), (2**31, 0)])
def test_experts_that_the_store_does_not_have_are_refused(source, layer, expert):
    with pytest.raises((LimitExceeded, ValueError)):
        visit(source, layer, [expert])

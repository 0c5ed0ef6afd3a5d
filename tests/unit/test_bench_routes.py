"""Forced routes: as often the same experts again as in the recorded trace, and exactly those that were given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compute_node.bench.forced_routes import force_routes
from compute_node.bench.geometries import geometry_named
from compute_node.bench.random_model import RandomModel
from compute_node.engine.model import Model, ModelOptions
from tierd.client.in_process import InProcess
from tierd.client.source import Phase
from tierd.errors import UsageError
from tierd.policy.drawn_routes import RECORDED, RouteModel, lru_hit_rates, reuse_depths
from tierd.policy.trace import load_trace

TRACE = Path(__file__).parents[1] / "bench" / "traces" / "held.npz"
FRACTIONS = (0.125, 0.25, 0.5)


@pytest.fixture(scope="module")
def trace():
    return load_trace(TRACE).experts[:6144]


def test_depths_are_those_of_an_order_of_last_use():
    choices = np.array([[2, 0], [0, 2], [1, 2]])
    assert reuse_depths(choices, 4).tolist() == [[2, 0], [1, 0], [2, 1]]


def lru_by_hand(choices, slots):
    """Hits of a cache that keeps the last used experts, each token's looked up before any of them is moved."""
    cache, hits = [], 0
    for chosen in choices.tolist():
        hits += sum(expert in cache[:slots] for expert in chosen)
        cache = chosen + [expert for expert in cache if expert not in chosen]
    return hits / choices.size


def test_hit_rates_are_those_of_a_cache(trace):
    layer = trace[:1500, 3]
    for fraction, found in zip(FRACTIONS, lru_hit_rates(layer, 32, FRACTIONS), strict=True):
        assert found == pytest.approx(lru_by_hand(layer, int(32 * fraction)), abs=0.01)


@pytest.mark.parametrize(("layers", "experts", "top_k"), [(8, 32, 4), (16, 64, 8), (4, 128, 8)])
def test_generated_routes_hit_as_often_as_recorded_ones(trace, layers, experts, top_k):
    model = RouteModel.fitted(trace, 32)
    routes = model.generate(tokens=1600, layers=layers, experts=experts, top_k=top_k)
    for layer in range(layers):
        recorded = lru_hit_rates(trace[:, layer * 8 // layers], 32, FRACTIONS)
        # A cold cache has its own misses: they are left out on both sides.
        generated = lru_hit_rates(routes[:, layer], experts, FRACTIONS)
        assert np.abs(np.array(generated) - recorded).max() < 0.02


def test_the_curves_that_are_shipped_are_those_of_the_trace():
    trace = load_trace(TRACE).experts[:24576]
    assert np.abs(RouteModel.fitted(trace, 32).shares - RECORDED.shares).max() < 1e-4


def test_rows_hold_distinct_experts_and_seeds_differ():
    routes = RECORDED.generate(tokens=50, layers=3, experts=9, top_k=8, seed=1)
    assert all(len(set(row)) == 8 for row in routes.reshape(-1, 8).tolist())
    assert routes.min() >= 0
    assert routes.max() <= 8
    assert not np.array_equal(routes, RECORDED.generate(tokens=50, layers=3, experts=9, top_k=8, seed=2))
    with pytest.raises(UsageError, match="9 of 8"):
        RECORDED.generate(tokens=1, layers=1, experts=8, top_k=9)


SMALL = geometry_named("olmoe-1b-7b").config | {
    "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 300, "num_hidden_layers": 3,
}  # fmt: skip


@pytest.mark.parametrize("execution", ["fused", "layers"])
def test_a_model_goes_the_way_that_it_is_told(execution):
    routes = RECORDED.generate(tokens=5, layers=3, experts=8, top_k=2)
    source = InProcess(RandomModel(SMALL))
    options = ModelOptions(context=16, threads=1, execution=execution)
    with Model(source, options, adapt=lambda program: force_routes(program, routes)) as model:
        sequence, seen = model.cache.take(), []
        model.extend(
            sequence, [1, 2, 3, 4, 5, 6, 7], phase=Phase.PREFILL,
            observe=lambda layer, indices, weights: seen.append((layer, indices.copy(), weights.copy())),
        )  # fmt: skip
        for layer, indices, weights in seen:
            assert indices.tolist() == routes[[0, 1, 2, 3, 4, 0, 1], layer].tolist()
            assert (weights == 0.5).all()
        used = source._cache._uses.sum() + sum(source.stats.outcomes.values())
        model.extend(sequence, [8], phase=Phase.DECODE)
        assert source._cache._uses.sum() + sum(source.stats.outcomes.values()) > used


def test_routes_of_another_model_are_refused():
    for routes in (np.zeros((4, 2, 2), np.int32), np.zeros((4, 3, 2), np.int64), np.zeros((0, 3, 2), np.int32)):
        with pytest.raises(UsageError, match=r"\[positions, 3, 2\]"):
            Model(
                InProcess(RandomModel(SMALL)),
                ModelOptions(context=16, threads=1),
                adapt=lambda program, given=routes: force_routes(program, given),
            )

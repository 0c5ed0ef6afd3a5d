"""The fused step against the same step layer by layer and op by op."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compute_node.engine.model import EXECUTIONS, Model, ModelOptions
from compute_node.engine.oracle import read_reference
from tierd.checkpoint.convert import convert
from tierd.client.in_process import InProcess
from tierd.client.source import Phase
from tierd.errors import UsageError
from tierd.store.store import ExpertStore

ORACLES = Path(__file__).parents[1] / "oracles"


@pytest.fixture(scope="module", params=["olmoe", "qwen3_moe"])
def folder(request):
    return request.param


@pytest.fixture(scope="module")
def store(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp(folder) / "store"
    convert(ORACLES / folder, path, experts="int4-g64", dense="int8")
    return ExpertStore.open(path)


@pytest.fixture(scope="module")
def tokens(folder):
    return read_reference(ORACLES / folder / "ref.npz").input_ids


class Counted(InProcess):
    """Counts the layers for which Python was asked."""

    asked = 0

    def visit(self, layer, experts, use, *, step, phase):
        self.asked += 1
        super().visit(layer, experts, use, step=step, phase=phase)


def decode(source, tokens, **options):
    """Logits of every token, one token to a step."""
    with Model(source, ModelOptions(context=64, **options)) as model:
        sequence = model.cache.take()
        rows = [model.extend(sequence, [token], phase=Phase.DECODE)[0] for token in tokens]
        assert model.experts_chosen == source.stats.requested
        return np.stack(rows)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("slots", [1, None])
def test_all_ways_to_run_a_step_give_the_same_bits(store, tokens, numerics, slots):
    budget = None if slots is None else slots * store.geometry.slot_bytes
    found = {}
    for execution in EXECUTIONS:
        source = Counted(store, budget=budget)
        found[execution] = decode(source, tokens, numerics=numerics, execution=execution, threads=2)
        assert source.stats.requested == sum(source.stats.outcomes.values()) == sum(source.stats.tiers.values())
        layers = len(store.geometry.layers) * len(tokens)
        assert source.stats.visits == layers
        assert (source.asked == layers) == (execution != "fused" or slots is not None)
    assert np.isfinite(found["fused"]).all()
    assert np.array_equal(found["fused"], found["layers"])
    assert np.array_equal(found["fused"], found["ops"])


def test_where_everything_is_resident_python_is_not_asked(store, tokens):
    source = Counted(store)
    first = decode(source, tokens, threads=1)
    asked, hits = source.asked, source.stats.outcomes["hit"]
    assert np.array_equal(decode_again(source, tokens), first)
    assert source.asked == asked
    assert source.stats.outcomes["hit"] > hits


def decode_again(source, tokens):
    with Model(source, ModelOptions(context=64, threads=2)) as model:
        sequence = model.cache.take()
        return np.stack([model.extend(sequence, [token], phase=Phase.DECODE)[0] for token in tokens])


def test_counters_tell_the_phases_apart(store, tokens):
    source = InProcess(store)
    with Model(source, ModelOptions(context=64, threads=1)) as model:
        model.extend(model.cache.take(), tokens, phase=Phase.PREFILL)
    with Model(source, ModelOptions(context=64, threads=1)) as model:
        sequence = model.cache.take()
        model.extend(sequence, tokens[:8], phase=Phase.PREFILL)
        prefill = int(source._cache._uses[0].sum())
        assert prefill > 0
        assert not source._cache._uses[1].any()
        model.extend(sequence, tokens[8:9], phase=Phase.DECODE)
        assert source._cache._uses[0].sum() == prefill
        assert source._cache._uses[1].sum() == len(store.geometry.layers) * store.geometry.top_k


def test_the_least_recently_used_expert_leaves_whoever_used_it(store, tokens):
    """The same experts are read whether native code or Python sees the hits."""
    misses = []
    for execution in ("fused", "layers"):
        source = InProcess(store, budget=12 * store.geometry.slot_bytes)
        decode(source, tokens, execution=execution, threads=1)
        misses.append(source.stats.outcomes["miss"])
    assert misses[0] == pytest.approx(misses[1], rel=0.2)


def test_a_source_without_direct_access_is_visited(store, tokens):
    class Indirect(Counted):
        direct = None

    source = Indirect(store)
    assert np.array_equal(decode(source, tokens, threads=1), decode(InProcess(store), tokens, threads=1))
    assert source.asked == len(tokens) * len(store.geometry.layers)


def test_direct_access_that_ends_within_a_step_changes_no_bit(store, tokens):
    class Ending(Counted):
        ended = False

        @property
        def direct(self):
            return None if self.ended else super().direct

        def visit(self, layer, experts, use, *, step, phase):
            super().visit(layer, experts, use, step=step, phase=phase)
            self.ended = not self.ended

    assert np.array_equal(decode(Ending(store), tokens, threads=2), decode(InProcess(store), tokens, threads=1))


def test_an_unknown_execution_is_refused(store):
    with pytest.raises(UsageError, match="unknown execution 'magic'"):
        Model(InProcess(store), ModelOptions(execution="magic"))


def test_a_crowd_decodes_in_one_native_step_and_changes_no_bit(store, tokens):
    source = Counted(store)
    with Model(source, ModelOptions(context=64, sequences=20, rows=64, threads=2)) as model:
        prompts = [tokens[: 2 + place] for place in range(20)]
        places = [model.cache.take() for _ in prompts]
        last = []
        for place, prompt in zip(places, prompts, strict=True):
            model.extend(place, prompt[:-1], phase=Phase.PREFILL)
            assert model.cache.reserve(place, 1)
            last.append(prompt[-1])
        alone = [model.extend(place, [token], phase=Phase.DECODE)[0] for place, token in zip(places, last, strict=True)]
        for place, prompt in zip(places, prompts, strict=True):
            model.cache.keep_prefix(place, prompt[:-1])
        asked = source.asked
        positions = [len(place.tokens) for place in places]
        together = model.forward(last, positions, places, phase=Phase.DECODE, logits_of=range(20))
        assert source.asked == asked
        assert np.array_equal(together, np.stack(alone))


def test_a_step_that_is_watched_comes_by_every_layer_before_its_experts_and_gives_the_same_bits(store, tokens):
    source, seen = Counted(store), []
    first = decode(source, tokens, threads=1)
    with Model(source, ModelOptions(context=64, threads=1)) as model:
        begin = model._steps.begin
        model._foresight.begin = lambda *_: None  # it stays awake, as if somebody listened

        def watched(rows, **how):
            routes = model.program.route_indices
            begin(rows, **how | {"passing": lambda layer: seen.append((layer, routes[0].tolist()))})

        model._steps.begin = watched
        asked, sequence = source.asked, model.cache.take()
        again = np.stack([model.extend(sequence, [token], phase=Phase.DECODE)[0] for token in tokens])
    assert np.array_equal(again, first)
    assert source.asked == asked
    layers = [entry.layer for entry in store.geometry.layers]
    assert [layer for layer, _ in seen] == layers * len(tokens)
    assert all(len(set(routes)) == store.geometry.top_k for _, routes in seen)


class Hints:
    """A `StepHints` that hints nothing and notes which steps it was told of."""

    active = everywhere = asleep = False

    def __init__(self):
        self.told, self.stops = [], 0

    def begin(self, _tokens, *, step, **_how):
        self.told.append(step)

    def at(self, _layer, _routes):
        self.stops += 1

    def end(self, seconds):
        assert seconds > 0


def test_steps_are_not_told_of_while_nothing_is_lacking_for_long_and_change_no_bit(store, tokens):
    source = Counted(store)
    first = decode(source, tokens, threads=1)
    with Model(source, ModelOptions(context=64, threads=1)) as model:
        model.hinting = hints = Hints()
        sequence, logits = model.cache.take(), []
        for number, token in enumerate(tokens):
            hints.asleep = number % 2 == 1
            logits.append(model.extend(sequence, [token], phase=Phase.DECODE)[0])
    assert hints.told == list(range(0, len(tokens), 2))
    assert np.array_equal(np.stack(logits), first)

"""Bits must not depend on how the work is cut, batched, threaded, or on how experts arrive."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compute_node.engine.expert_step import assign_routes
from compute_node.engine.model import Model, ModelOptions
from compute_node.engine.oracle import read_reference
from tierd.checkpoint.convert import convert
from tierd.client.in_process import InProcess
from tierd.client.source import Phase
from tierd.errors import DriveError, LimitExceeded, TierdError, UsageError
from tierd.store.store import ExpertStore

ORACLES = Path(__file__).parents[1] / "oracles"
FOLDERS = ("olmoe_clip", "mixtral_sliding", "qwen3_moe")


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request):
    return request.param


@pytest.fixture(scope="module")
def store(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp(folder) / "store"
    convert(ORACLES / folder, path, experts="int4-g64", dense="bf16")
    return ExpertStore.open(path)


@pytest.fixture(scope="module")
def tokens(folder):
    return read_reference(ORACLES / folder / "ref.npz").input_ids


def prompt_logits(source, tokens, chunks, **options):
    """Logits of all tokens, computed in chunks of the given sizes."""
    with Model(source, ModelOptions(context=64, **({"threads": 1} | options))) as model:
        sequence, rows, start = model.cache.take(), [], 0
        for size in chunks:
            part = tokens[start : start + size]
            phase = Phase.PREFILL if size > 1 else Phase.DECODE
            rows.append(model.extend(sequence, part, phase=phase, logits_of=range(len(part))))
            start += size
        assert start == len(tokens)
        return np.concatenate(rows)


@pytest.fixture(scope="module")
def whole(store, tokens):
    logits = prompt_logits(InProcess(store), tokens, [len(tokens)])
    assert np.isfinite(logits).all()
    return logits


class Reordered(InProcess):
    """Delivers in another order, and some experts with wrong bytes before the right ones."""

    def __init__(self, store, seed):
        super().__init__(store)
        self._generator = np.random.default_rng(seed)

    def visit(self, layer, experts, use, *, step, phase):
        calls = []
        super().visit(layer, experts, lambda *call: calls.append(call), step=step, phase=phase)
        for place in self._generator.permutation(len(calls)):
            expert, address = calls[place]
            if self._generator.random() < 0.5:
                use(expert, calls[place - 1][1])
            use(expert, address)


@pytest.mark.parametrize("chunks", [[1] * 24, [7, 7, 7, 3], [23, 1], [1, 23], [12, 1, 1, 10]])
def test_chunk_borders_change_no_bit(store, tokens, whole, chunks):
    assert np.array_equal(prompt_logits(InProcess(store), tokens, chunks), whole)


@pytest.mark.parametrize("seed", range(3))
def test_order_of_arrival_and_torn_first_reads_change_no_bit(store, tokens, whole, seed):
    assert np.array_equal(prompt_logits(Reordered(store, seed), tokens, [20, 1, 1, 1, 1]), whole)


def test_threads_change_no_bit(store, tokens, whole):
    assert np.array_equal(prompt_logits(InProcess(store), tokens, [20, 4], threads=2), whole)


def test_a_tiny_arena_changes_no_bit(store, tokens, whole):
    source = InProcess(store, budget=store.geometry.slot_bytes)
    assert np.array_equal(prompt_logits(source, tokens, [9, 15]), whole)
    assert source.stats.outcomes["miss"] > store.geometry.experts_total


def test_a_batch_of_sequences_changes_no_bit(store, tokens, whole):
    with Model(InProcess(store), ModelOptions(context=32, sequences=3, threads=1)) as model:
        places = [model.cache.take() for _ in range(3)]
        assert all(model.cache.reserve(place, len(tokens)) for place in places)
        assert len({place.address for place in places}) == len({place.held()[0] for place in places}) == 3
        first, last = [token ^ 1 for token in tokens], [token ^ 2 for token in tokens]
        for start in range(0, len(tokens), 8):
            part = slice(start, start + 8)
            rows = [*first[part], *tokens[part], *last[part]]
            logits = model.forward(
                rows,
                [*range(start, start + 8)] * 3,
                [place for place in places for _ in range(8)],
                phase=Phase.PREFILL,
                logits_of=range(24),
            )
            for place, row in zip(places, range(0, 24, 8), strict=True):
                model.cache.advance(place, rows[row : row + 8])
            assert np.array_equal(logits[8:16], whole[part])
            assert not np.array_equal(logits[:8], whole[part])
            assert not np.array_equal(logits[16:], whole[part])


@pytest.fixture(scope="module")
def fast(store, tokens):
    return prompt_logits(InProcess(store), tokens, [len(tokens)], numerics="fast")


def test_fast_numerics_are_close_but_not_the_same(whole, fast):
    assert not np.array_equal(fast, whole)
    assert np.linalg.norm(fast - whole) < 0.05 * np.linalg.norm(whole)


@pytest.mark.parametrize("chunks", [[1] * 24, [7, 7, 7, 3], [1, 23]])
def test_chunks_threads_and_arrival_change_no_bit_of_fast_numerics(store, tokens, fast, chunks):
    found = prompt_logits(Reordered(store, 5), tokens, chunks, numerics="fast", threads=2)
    assert np.array_equal(found, fast)


def test_head_rows_change_no_bit(store, tokens, whole):
    assert np.array_equal(prompt_logits(InProcess(store), tokens, [24], head_rows=5), whole)


def test_a_used_place_in_the_cache_leaves_no_trace(store, tokens, whole):
    with Model(InProcess(store), ModelOptions(context=64, threads=1)) as model:
        sequence = model.cache.take()
        model.extend(sequence, [5] * 40, phase=Phase.PREFILL)
        model.cache.give_back(sequence)
        again = model.cache.take()
        logits = model.extend(again, tokens, phase=Phase.PREFILL, logits_of=range(len(tokens)))
        assert np.array_equal(logits, whole)


def test_the_model_counts_the_experts_it_chose_like_the_source(store, tokens):
    source = InProcess(store)
    with Model(source, ModelOptions(threads=1)) as model:
        seen = []
        model.extend(
            model.cache.take(),
            tokens,
            phase=Phase.PREFILL,
            observe=lambda _, routes, __: seen.append(np.unique(routes).size),
        )
        assert model.experts_chosen == source.stats.requested == sum(seen)
        assert model.times.steps == 1
        assert 0 < model.times.wait_seconds < model.times.seconds


def test_cancelling_stops_before_the_next_layer_asks_for_experts(store, tokens):
    source = InProcess(store)
    with Model(source, ModelOptions(threads=1)) as model:
        sequence = model.cache.take()
        answers = iter([False, False, True])
        assert model.extend(sequence, tokens, phase=Phase.PREFILL, cancelled=lambda: next(answers)) is None
        assert source.stats.visits == 1
        assert sequence.tokens == []


def test_a_source_that_forgets_an_expert_is_noticed(store, tokens):
    class Forgetful(InProcess):
        def visit(self, layer, experts, use, *, step, phase):
            super().visit(layer, experts[:-1], use, step=step, phase=phase)

    with Model(Forgetful(store), ModelOptions(threads=1)) as model, pytest.raises(TierdError, match="did not deliver"):
        model.extend(model.cache.take(), tokens, phase=Phase.PREFILL)


def test_an_error_of_the_source_leaves_the_sequence_as_it_was(store, tokens, whole):
    class Failing(InProcess):
        broken = True

        def visit(self, layer, experts, use, *, step, phase):
            if self.broken:
                raise DriveError("gone", path="x")
            super().visit(layer, experts, use, step=step, phase=phase)

    source = Failing(store)
    with Model(source, ModelOptions(threads=1)) as model:
        sequence = model.cache.take()
        with pytest.raises(DriveError):
            model.extend(sequence, tokens, phase=Phase.PREFILL)
        assert sequence.tokens == []
        source.broken = False
        logits = model.extend(sequence, tokens, phase=Phase.PREFILL)
        assert np.array_equal(logits[0], whole[-1])


def test_limits_are_errors_not_wrong_numbers(store):
    with Model(InProcess(store), ModelOptions(context=8, threads=1)) as model:
        sequence = model.cache.take()
        for tokens, message in (
            ([128], "token id 128"),
            ([-1], "token id -1"),
            ([], "0 tokens"),
            ([1] * 9, "9 tokens"),
        ):
            with pytest.raises(LimitExceeded, match=message):
                model.extend(sequence, tokens, phase=Phase.PREFILL)
        model.extend(sequence, [1] * 8, phase=Phase.PREFILL)
        with pytest.raises(LimitExceeded, match="context of 8 tokens is full"):
            model.extend(sequence, [1], phase=Phase.DECODE)
        with pytest.raises(LimitExceeded, match="sequences"):
            model.cache.take()
    for options in (
        ModelOptions(context=0),
        ModelOptions(context=257),
        ModelOptions(rows=0),
        ModelOptions(numerics="rough"),
    ):
        with pytest.raises(UsageError):
            Model(InProcess(store), options)


def test_routes_are_gathered_by_rank_first():
    routes = np.array([[3, 1], [1, 0], [3, 2]], np.int32)
    assert assign_routes(routes) == {3: ([0, 2], [0, 0]), 1: ([1, 0], [0, 1]), 0: ([1], [1]), 2: ([2], [1])}
    assert list(assign_routes(routes)) == [3, 1, 0, 2]

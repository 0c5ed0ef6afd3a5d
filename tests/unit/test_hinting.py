"""When a node hints, for which layers, and what it makes of the answers; and hints that are drawn for measurements."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from compute_node.bench.drawn_hints import DrawnHints, Foreseen, Named
from compute_node.kernels import Matrix
from compute_node.models.look_ahead import LookAhead, RouterWeights
from compute_node.prediction.hinting import LOOKED_ON_STEPS, Hinting
from compute_node.prediction.union_guess import UnionGuess
from tierd.policy.token_table import TokenTable
from tierd.prefetch.throttle import Throttle

LAYERS, EXPERTS, TOP_K, HIDDEN = (0, 2, 3), 16, 4, 8


class Source:
    """Hears hints; `missing` says which experts are absent."""

    def __init__(self, *, missing=True):
        self.missing = missing
        self.hints = []

    def absent(self, layer):
        del layer
        return np.full(EXPERTS, self.missing)

    def hint(self, layer, experts, probabilities, *, step, lead_seconds):
        assert len(experts) == len(probabilities)
        assert lead_seconds >= 0
        assert probabilities == sorted(probabilities, reverse=True)
        self.hints.append((step, layer, experts))


def made(always=None):
    rng = np.random.default_rng(0)
    routers = {
        layer: RouterWeights(
            np.ones(HIDDEN, np.float32),
            Matrix("f32", EXPERTS, HIDDEN, rng.normal(size=(EXPERTS, HIDDEN)).astype(np.float32)),
        )
        for layer in LAYERS
    }
    residual = rng.normal(size=(4, HIDDEN)).astype(np.float32)
    return LookAhead(routers, residual, np.zeros((4, EXPERTS), np.float32), 1e-6, always)


@pytest.fixture
def look():
    return made()


def hinting(source, look, throttle=None, record=4096):
    geometry = SimpleNamespace(
        top_k=TOP_K,
        layers=[SimpleNamespace(layer=layer, experts=EXPERTS) for layer in LAYERS],
        slot_bytes=record,
        hidden_size=HIDDEN,
    )
    return Hinting(
        source,
        geometry,
        look,
        lambda segment: [op() for op in segment.ops],
        TokenTable([EXPERTS] * len(LAYERS)),
        throttle or Throttle(fixed=True),
        clock=iter(np.arange(1e6)).__next__,
    )


def logits_of(look, layer, state):
    look.batch.set_rows(1)
    look.state[0] = state
    for op in look.segment(layer).ops:
        op()
    return look.logits[0].copy()


def test_a_step_that_waits_hints_for_the_next_layer_what_its_router_says_of_the_state(look):
    source = Source()
    node = hinting(source, look)
    node.begin([5], step=9, decode=True)
    source.hints.clear()
    node.at(0, np.arange(TOP_K, dtype=np.int32)[None])
    known = np.full((1, HIDDEN), 0.5, np.float32)
    node.meanwhile(0, known)
    expected = np.argsort(-logits_of(look, 2, look.residual[0] + known[0]))[:TOP_K]
    ((step, layer, experts),) = source.hints
    assert (step, layer) == (9, 2)
    assert set(experts[:TOP_K]) == set(expected.tolist())
    assert len(experts) <= 2 * TOP_K


def test_what_a_shared_expert_gives_is_part_of_the_state_that_is_looked_ahead_from(look):
    always, known = np.full((4, HIDDEN), 2.0, np.float32), np.full((1, HIDDEN), 0.5, np.float32)
    always[:, ::2] = -1
    source, shared = Source(), made(always)
    node = hinting(source, shared)
    node.begin([5], step=0, decode=True)
    source.hints.clear()
    node.meanwhile(0, known)
    expected = np.argsort(-logits_of(look, 2, look.residual[0] + known[0] + always[0]))[:TOP_K]
    ((_, _, experts),) = source.hints
    assert set(experts[:TOP_K]) == set(expected.tolist())
    assert set(expected.tolist()) != set(np.argsort(-logits_of(look, 2, look.residual[0] + known[0]))[:TOP_K].tolist())


def test_nothing_is_said_where_nothing_is_absent_and_by_a_prompt_behind_the_last_layer(look):
    source = Source(missing=False)
    node = hinting(source, look)
    node.begin([5], step=0, decode=True)
    for layer in LAYERS:
        node.at(layer, np.arange(TOP_K, dtype=np.int32)[None])
        node.meanwhile(layer, np.zeros((1, HIDDEN), np.float32))
    source.missing = True
    node.begin([5] * 4, step=1, decode=False)
    node.meanwhile(3, np.zeros((4, HIDDEN), np.float32))
    assert source.hints == []


def test_a_prompt_hints_for_what_its_rows_together_will_want_of_the_next_layer(look):
    source = Source()
    node = hinting(source, look)
    node.begin([5] * 4, step=7, decode=False)
    assert node.active
    assert source.hints == []
    known = np.full((4, HIDDEN), 0.5, np.float32)
    node.meanwhile(0, known)
    chosen = np.array([np.argsort(-logits_of(look, 2, row + 0.5))[:TOP_K] for row in look.residual])
    ((step, layer, experts),) = source.hints
    assert (step, layer, len(experts)) == (7, 2, 2 * TOP_K)
    by_count = np.bincount(chosen.ravel(), minlength=EXPERTS)
    assert by_count[experts].sum() >= 0.7 * np.sort(by_count)[-2 * TOP_K :].sum()


def test_a_prompt_learns_how_far_the_next_router_is_to_be_believed(look):
    source, known = Source(), np.zeros((4, HIDDEN), np.float32)
    node = hinting(source, look, Throttle(3, fixed=True))
    rng = np.random.default_rng(3)
    for step in range(150):
        node.begin([5] * 4, step=step, decode=False)
        node.meanwhile(0, known)
        # Each row chooses by chance, so that no guess is better than another.
        node.at(2, np.array([rng.permutation(EXPERTS)[:TOP_K] for _ in range(4)], np.int32))
    guess = node._union.wanted(1, known, np.ones(EXPERTS, np.bool_))
    assert np.allclose(guess, 1 - (1 - TOP_K / EXPERTS) ** 4, atol=0.12)


def test_a_long_prompt_is_judged_by_a_sample_of_its_rows(look):
    calls = []
    guess = UnionGuess(look, lambda segment: calls.append([op() for op in segment.ops]), list(LAYERS), TOP_K)
    look.residual = np.repeat(look.residual, 50, axis=0)
    wanted = guess.wanted(1, np.zeros((200, HIDDEN), np.float32), np.ones(EXPERTS, np.bool_))
    assert len(calls) == 16
    assert ((wanted > 0.5) & (wanted <= 1)).any()


def test_off_computes_nothing_and_still_measures(look):
    throttle = Throttle(0)
    node = hinting(Source(), look, throttle)
    node.begin([5], step=0, decode=True)
    assert not node.active
    for _ in range(200):
        node.end(1.0)
    assert throttle.level in range(4)


def test_hints_change_no_state_of_the_step(look):
    node = hinting(Source(), look)
    before = look.residual.copy(), look.router_logits.copy()
    node.begin([5], step=0, decode=True)
    node.at(0, np.arange(TOP_K, dtype=np.int32)[None])
    node.meanwhile(0, np.ones((1, HIDDEN), np.float32))
    node.end(0.1)
    assert np.array_equal(look.residual, before[0])
    assert np.array_equal(look.router_logits, before[1])


def test_behind_its_last_layer_a_step_hints_for_the_next_one_what_followed_its_token_before(look):
    source = Source()
    node = hinting(source, look, Throttle(3, fixed=True))
    starts = np.arange(len(LAYERS))[:, None] * EXPERTS
    for step in range(40):
        # Token 5 is followed by 6, whose first layer chooses the last experts.
        token = 5 + step % 2
        first = EXPERTS - TOP_K if token == 6 else 0
        chosen = np.arange(first, first + TOP_K, dtype=np.int32)
        node.begin([token], step=step, decode=True)
        source.hints.clear()
        for layer in LAYERS:
            node.at(layer, chosen[None])
            node.meanwhile(layer, np.zeros((1, HIDDEN), np.float32))
        node.end(0.1)
        node._tokens._table.count(token, (chosen + starts).astype(np.int32), previous=None if step == 0 else 11 - token)
    node.begin([5], step=40, decode=True)
    source.hints.clear()
    node.at(3, np.arange(TOP_K, dtype=np.int32)[None])
    node.meanwhile(3, np.zeros((1, HIDDEN), np.float32))
    said = {(step, layer): set(experts[:TOP_K]) for step, layer, experts in source.hints}
    assert said[41, 0] == set(range(EXPERTS - TOP_K, EXPERTS))
    assert (41, 2) in said


def test_layers_that_lack_only_what_was_hinted_are_looked_ahead_of_early_where_records_are_large(look):
    source = Source()
    node = hinting(source, look, record=1 << 21)
    assert not hinting(source, look).everywhere
    node.begin([5], step=9, decode=True)
    assert node.everywhere
    named = set(source.hints[0][2])
    source.hints.clear()
    others = [expert for expert in range(EXPERTS) if expert not in named]
    node.passing(0, np.array([others[:TOP_K]], np.int32))
    assert source.hints == []  # it will stop there
    node.passing(0, np.array([sorted(named)[:TOP_K]], np.int32))
    assert [(step, layer) for step, layer, _ in source.hints] == [(9, 2), (9, 3)]
    for _, layer, experts in source.hints:
        expected = np.argsort(-logits_of(look, layer, look.residual[0]))[:TOP_K]
        assert set(experts[:TOP_K]) == set(expected.tolist())
    node.meanwhile(0, np.ones((1, HIDDEN), np.float32))
    assert len(source.hints) == 2  # once is enough
    source.missing = False
    node.passing(2, np.array([others[:TOP_K]], np.int32))
    assert len(source.hints) == 2  # nothing is absent
    node.begin([5], step=14, decode=True)
    assert not node.everywhere  # for some steps nothing was


def test_where_nothing_lacks_for_some_steps_the_next_ones_need_not_be_told_of_and_teach_nothing(look):
    source = Source()
    source.missing = False
    node = hinting(source, look)
    node._tokens.learn = lambda *lesson: lessons.append(lesson)
    lessons, awake = [], 0
    for step in range(1, 9):
        node.begin([5], step=step, decode=True)
        node.end(0.1)
        awake += not node.asleep
    assert awake == LOOKED_ON_STEPS
    node.at(0, np.arange(TOP_K, dtype=np.int32)[None])  # of a step that it was not told of
    assert lessons == []
    node.begin([5], step=20, decode=True)
    node.at(0, np.arange(TOP_K, dtype=np.int32)[None])
    assert len(lessons) == 1
    assert not node.asleep


@pytest.mark.parametrize("right", [True, False])
def test_drawn_hints_name_as_many_missing_experts_and_others_as_was_measured(right):
    rng = np.random.default_rng(1)
    routes = np.stack([rng.permuted(np.arange(EXPERTS, dtype=np.int32))[:TOP_K] for _ in range(900)])
    routes = routes.reshape(300, 3, TOP_K)
    source = Source()
    named = Named((0.9, 0.5), (0.6, 0.2), (0.07, 0.2))
    hints = DrawnHints(
        source, LAYERS, EXPERTS, routes, Foreseen(named, named, Named((1.0,), (1.0,), (0.0,)), named),
        right=right, throttle=Throttle(fixed=True), lead_seconds=0.1,
    )  # fmt: skip
    hits = {"this token": [], "next layer": [], "last token": []}

    def heard(kind, layer, position):
        for step, of, experts in source.hints:
            if of == layer:
                assert step == position
                hits[kind] += [expert in routes[position, LAYERS.index(layer)] for expert in experts]
        source.hints.clear()

    for position in range(299):
        hints.begin([0], step=position, decode=True)
        heard("this token", 0, position)
        hints.meanwhile(0, np.zeros((1, HIDDEN), np.float32))
        heard("next layer", 2, position)
        hints.meanwhile(3, np.zeros((1, HIDDEN), np.float32))
        heard("last token", 0, position + 1)
        hints.end(0.1)
    missing = 299 * TOP_K
    assert sum(hits["this token"]) == right * missing
    for kind in ("next layer", "last token"):
        assert sum(hits[kind]) == pytest.approx(right * 0.8 * missing, rel=0.06)
        assert len(hits[kind]) == pytest.approx(1.07 * missing, rel=0.06 if right else 0.12)

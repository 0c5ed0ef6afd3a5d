"""Which experts the next token will want is told better by tokens that may be sampled than by what followed before."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from compute_node.engine.model import Model, ModelOptions
from compute_node.prediction.layer_guesses import LayerGuesses
from compute_node.prediction.next_step import NextStep
from compute_node.prediction.token_scores import TokenScores
from tierd.client.in_process import InProcess
from tierd.client.source import Phase
from tierd.policy.token_table import TokenTable
from tierd.store.store import ExpertStore

LAYERS, EXPERTS, TOP_K = 8, 32, 4
LIKELY = 0.5


class Guesser:
    """Foresees the first layer of each next token, and counts what came true of what it called likely."""

    def __init__(self, look):
        self.table = TokenTable([EXPERTS] * LAYERS)
        self.scores = TokenScores(self.table, [EXPERTS] * LAYERS, TOP_K)
        self.step = NextStep(look, run, self.table, self.scores, LayerGuesses([EXPERTS] * LAYERS, TOP_K))
        self.right, self.wrong = 0, 0
        self.wanted, self.previous = None, None

    def look(self, token):
        self.step.ask(1)
        self.wanted = self.step.wanted(0, [token], np.ones(EXPERTS, np.bool_))

    def end(self, token, routes):
        self.step.refresh()
        flat = routes + np.arange(LAYERS, dtype=np.int32)[:, None] * EXPERTS
        self.table.count(token, flat, previous=self.previous)
        self.previous = token

    def begin(self, token):
        self.step.begin([token], follows=self.wanted is not None)

    def chosen(self, routes):
        if self.wanted is not None:
            likely = np.flatnonzero(self.wanted >= LIKELY)
            right = len(set(likely.tolist()) & set(routes.tolist()))
            self.right, self.wrong = self.right + right, self.wrong + len(likely) - right
        for lesson in self.step.lessons(0, routes[None]):
            lesson()


def run(segment):
    for op in segment.ops:
        op()


def test_tokens_that_may_be_sampled_foresee_more_experts_than_what_followed_before(embedded_store):
    rng = np.random.default_rng(4)
    with Model(InProcess(ExpertStore.open(embedded_store)), ModelOptions(context=304, threads=1)) as model:
        look = model.program.look_ahead
        informed, plain = Guesser(look), Guesser(SimpleNamespace(candidates=None))
        sequence, token, routes = model.cache.take(), 17, np.zeros((LAYERS, TOP_K), np.int32)

        def observe(layer, chosen, weights):
            del weights
            routes[layer] = chosen[0]
            for guesser in (informed, plain):
                if layer == 0:
                    guesser.chosen(chosen[0].copy())
                elif layer == LAYERS - 1:
                    look.start_from(slice(1), np.zeros((1, look.state.shape[1]), np.float32))
                    guesser.look(token)

        for _ in range(300):
            for guesser in (informed, plain):
                guesser.begin(token)
            logits = model.extend(sequence, [token], phase=Phase.DECODE, observe=observe)
            for guesser in (informed, plain):
                guesser.end(token, routes)
            drawn = logits[0] / 0.7 + rng.gumbel(size=logits.shape[1])
            token = int(drawn.argmax())
        model.cache.give_back(sequence)
    assert informed.right > 2 * plain.right
    assert informed.right > informed.wrong

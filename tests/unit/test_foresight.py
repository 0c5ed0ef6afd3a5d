"""What a node tells the daemon of its steps: layers by stops, uses by the session's memory, and never a wrong guess
about which token came before."""

from __future__ import annotations

import numpy as np
import pytest

from compute_node.prediction.foresight import Foresight
from tierd.client.source import StepMemory
from tierd.store.geometry import ExpertLayer, Geometry
from tierd.store.records import expert_layout

LAYERS, EXPERTS, TOP_K = (1, 4), 8, 2


@pytest.fixture
def memory():
    return StepMemory(np.zeros(16, np.uint8), np.zeros(16, np.uint32))


@pytest.fixture
def foresight():
    layers = tuple(ExpertLayer(layer=layer, experts=EXPERTS, layout=0) for layer in LAYERS)
    layout = expert_layout("f32", hidden_size=32, intermediate_size=32)
    return Foresight(Geometry(hidden_size=32, intermediate_size=32, top_k=TOP_K, layers=layers, layouts=(layout,)))


def begin(foresight, memory, tokens, positions, sequences=None):
    rows = [0] * len(tokens) if sequences is None else sequences
    foresight.begin(memory, tokens, positions, rows)


def routes(*rows):
    return np.array(rows, np.int32)


def stopping_step(foresight, memory, token, position, first, second, *, sequence=0, step=1):
    begin(foresight, memory, [token], [position], [sequence])
    foresight.at(1, routes(first))
    foresight.at(4, routes(second))
    foresight.end(step)


def known(table, token):
    found = table.probabilities(token)
    return None if found is None else sorted(int(e) for e in found[0].ravel() if e >= 0)


def test_layers_before_a_stop_are_passed_and_those_after_it_are_not(foresight, memory):
    for position in range(0, 8, 2):
        stopping_step(foresight, memory, 5, position, [0, 1], [2, 3])
        stopping_step(foresight, memory, 6, position + 1, [4, 5], [6, 7])
    begin(foresight, memory, [5], [8])
    assert np.flatnonzero(memory.expect).tolist() == [0, 1, 10, 11]
    foresight.at(4, routes([2, 3]))  # native code went through layer 1 on its own
    assert np.flatnonzero(memory.expect).tolist() == [4, 5, 10, 11]
    foresight.end(9)
    assert np.flatnonzero(memory.expect).tolist() == [4, 5, 14, 15]
    assert 0 < memory.expect.max() <= 127  # the next step's uses are worth half


def test_a_native_step_of_one_row_is_learned_from_the_uses_in_the_sessions_memory(foresight, memory):
    begin(foresight, memory, [5], [0])
    memory.last_step[[0, 3, 9, 12]] = 7
    foresight.end(7)
    assert known(foresight.table.now, 5) == [0, 3, 9, 12]


@pytest.mark.parametrize("used", [[0, 3, 9], [0, 3, 5, 9], [0, 3, 9, 12, 13]])
def test_uses_that_are_no_whole_step_teach_nothing(foresight, memory, used):
    begin(foresight, memory, [5], [0])
    memory.last_step[used] = 7
    foresight.end(7)
    assert known(foresight.table.now, 5) is None


def test_rows_that_were_computed_together_natively_teach_nothing(foresight, memory):
    begin(foresight, memory, [5, 6], [0, 1])
    memory.last_step[[0, 3, 9, 12]] = 7
    foresight.end(7)
    assert len(foresight.table.now) == 0


def test_a_step_that_was_given_up_teaches_nothing(foresight, memory):
    begin(foresight, memory, [5], [0])
    foresight.at(1, routes([0, 1]))
    stopping_step(foresight, memory, 6, 0, [2, 3], [2, 3])
    assert (known(foresight.table.now, 5), known(foresight.table.now, 6)) == (None, [2, 3, 10, 11])


def test_what_follows_a_token_is_learned_within_its_sequence_only(foresight, memory):
    stopping_step(foresight, memory, 5, 0, [0, 1], [0, 1], sequence=100)
    stopping_step(foresight, memory, 6, 0, [2, 3], [2, 3], sequence=200)
    stopping_step(foresight, memory, 7, 1, [4, 5], [4, 5], sequence=100)
    assert known(foresight.table.after, 5) == [4, 5, 12, 13]
    assert known(foresight.table.after, 6) is None
    stopping_step(foresight, memory, 8, 9, [6, 7], [6, 7], sequence=200)  # not the position after 0
    assert known(foresight.table.after, 6) is None


def test_rows_of_several_sequences_expect_together(foresight, memory):
    stopping_step(foresight, memory, 5, 0, [0, 1], [0, 1])
    stopping_step(foresight, memory, 6, 0, [2, 3], [2, 3], sequence=9)
    begin(foresight, memory, [5, 6], [1, 1], [0, 9])
    assert np.flatnonzero(memory.expect).tolist() == [0, 1, 2, 3, 8, 9, 10, 11]


def test_where_nobody_listens_nothing_is_done(foresight):
    stopping_step(foresight, None, 5, 0, [0, 1], [0, 1])
    assert foresight.asleep
    assert len(foresight.table.now) == 0


def test_when_nothing_is_waited_for_it_rests_until_something_is(foresight, memory):
    for step in range(1, 66):
        begin(foresight, memory, [step], [step])
        memory.last_step[[0, 3, 9, 12]] = step
        foresight.end(step)
    assert len(foresight.table.now) == 64
    for step in (69, 70):  # a stop where all is there changes nothing
        assert foresight.asleep
        begin(foresight, memory, [step], [step])
        foresight.at(1, routes([0, 1]))
        foresight.end(step)
    foresight.waited()
    assert not foresight.asleep
    stopping_step(foresight, memory, 71, 71, [0, 1], [2, 3])
    assert known(foresight.table.now, 70) is None
    assert known(foresight.table.now, 71) == [0, 1, 10, 11]

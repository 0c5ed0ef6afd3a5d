"""A step that is given up between layers leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numba import cfunc

from compute_node.commands.interruption import interruptible
from compute_node.engine.cancel import CancelWord
from compute_node.engine.model import Model, ModelOptions
from compute_node.engine.program import Segment
from compute_node.kernels import Op
from compute_node.kernels.lanes import i64_at
from compute_node.kernels.op import KERNEL
from compute_node.kernels.run_loop import SHARED_WORK
from tierd.checkpoint.convert import convert
from tierd.client.in_process import InProcess
from tierd.client.source import Phase
from tierd.store.store import ExpertStore

ORACLE = Path(__file__).parents[1] / "oracles" / "qwen3_moe"
TOKENS = [5, 9, 2, 7]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("cancelling") / "store"
    convert(ORACLE, path, experts="int4-g64", dense="int8")
    return ExpertStore.open(path)


@cfunc(KERNEL)
def wish_kernel(args, lo, hi):
    """Sets the word, once there is something to be set."""
    m = i64_at(args)
    if lo < hi:
        i64_at(m[0])[0] = m[1]


class Wish(CancelWord):
    """A word that the native step itself sets before the experts of its second layer, while `armed`."""

    __slots__ = ("record",)

    def __init__(self):
        super().__init__()
        self.record = np.array([self.address, 0], np.int64)

    def adapt(self, work):
        def change(program):
            op = Op("wish", "wish", wish_kernel.address, self.record, np.ones(1, np.int64), 1, False, 1, work, (self,))
            body = list(program.body)
            body[1] = Segment("wish", [op, *body[1].ops])
            return replace(program, body=tuple(body))

        return change


def logits_of(store):
    with Model(InProcess(store), ModelOptions(context=32, threads=1)) as model:
        sequence = model.cache.take()
        return np.stack([model.extend(sequence, [token], phase=Phase.DECODE)[0] for token in TOKENS])


@pytest.mark.parametrize("work", [0, SHARED_WORK])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_native_step_ends_at_its_next_layer_and_changes_no_bit(store, threads, work):
    source, wish = InProcess(store), Wish()
    options = ModelOptions(context=32, threads=threads)
    with Model(source, options, adapt=wish.adapt(work)) as model:
        warm = model.cache.take()
        for token in TOKENS:
            model.extend(warm, [token], phase=Phase.DECODE)
        model.cache.give_back(warm)
        sequence, found = model.cache.take(), []
        for token in TOKENS:
            wish.record[1] = 1
            visits, used = source.stats.visits, model.experts_chosen
            assert model.extend(sequence, [token], phase=Phase.DECODE, cancelled=wish) is None
            # The first layer was computed, the second never began.
            assert source.stats.visits == visits + 1
            assert model.experts_chosen == used + store.geometry.top_k
            assert len(sequence.tokens) == len(found)
            assert not source._cache._in_use.any()
            wish.record[1] = 0
            wish.clear()
            found.append(model.extend(sequence, [token], phase=Phase.DECODE, cancelled=wish)[0])
    assert np.array_equal(np.stack(found), logits_of(store))


def test_a_wish_that_was_taken_back_changes_no_bit(store):
    class Fickle(CancelWord):
        """Set for native code, but no longer when Python asks."""

        __slots__ = ()

        def __call__(self):
            return False

    word = Fickle()
    word.cancel()
    with Model(InProcess(store), ModelOptions(context=32, threads=2)) as model:
        sequence = model.cache.take()
        found = [model.extend(sequence, [token], phase=Phase.DECODE, cancelled=word)[0] for token in TOKENS]
    assert np.array_equal(np.stack(found), logits_of(store))


def test_ctrl_c_sets_the_word_and_a_second_one_interrupts():
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as word:
        assert not word()
        os.kill(os.getpid(), signal.SIGINT)
        assert word()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert not any(thread.name == "ctrl-c" for thread in threading.enumerate())


def test_ctrl_c_is_seen_while_the_main_thread_runs_no_python():
    """The handler is blocked out: only the listener can set the word."""
    with interruptible() as word:
        signal.signal(signal.SIGINT, lambda *_: None)
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            if word():
                break
            threading.Event().wait(0.005)
        assert word()

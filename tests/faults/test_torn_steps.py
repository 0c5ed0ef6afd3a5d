"""Records are overwritten while native code computes on them: the step is thrown away, then computed again."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

from compute_node.engine.model import Model, ModelOptions
from tierd.arena.fence import WriterFence
from tierd.client.in_process import InProcess
from tierd.client.source import Phase
from tierd.store.store import ExpertStore

TOKENS = [100 + 37 * place for place in range(32)]
MOST_ROUNDS = 40
ENOUGH = 5


class Torn(InProcess):
    """Everything is resident, and every record is overwritten again and again as a daemon would do it.

    A word leaves the table, a full fence follows, the bytes change; then they are right again and a new word is there.
    """

    def __init__(self, store):
        super().__init__(store)
        self._lock = threading.Lock()
        self._fence = WriterFence()
        self._over = threading.Event()

    def visit(self, *arguments, **named):
        with self._lock:  # a visit of this source trusts its own words
            super().visit(*arguments, **named)

    def overwrite_all(self):
        record_bytes = self.store.geometry.slot_bytes
        words, memory = self._cache._words, self._cache._memory
        while not self._over.is_set():
            for flat in np.flatnonzero(words).tolist():
                with self._lock:
                    word = int(words[flat])
                    start = ((word & 0xFFFFFF) - 1) * record_bytes
                    record = memory[start : start + record_bytes]
                    right = record.copy()
                    words[flat] = 0
                    self._fence()
                    record[:] = 0x5A
                    record[:] = right
                    self._fence()
                    words[flat] = word + (1 << 24)

    @contextlib.contextmanager
    def at_work(self):
        writer = threading.Thread(target=self.overwrite_all)
        writer.start()
        try:
            yield
        finally:
            self._over.set()
            writer.join()


def logits(model):
    sequence = model.cache.take()
    try:
        return np.stack([model.extend(sequence, [token], phase=Phase.DECODE)[0] for token in TOKENS])
    finally:
        model.cache.give_back(sequence)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_among_overwritten_records_gives_the_same_bits(embedded_store, numerics, threads, soak):
    options = ModelOptions(context=64, numerics=numerics, threads=threads)
    store = ExpertStore.open(embedded_store)
    with Model(InProcess(store), options) as model:
        expected = logits(model)
    source = Torn(store)
    with Model(source, options) as model:
        np.testing.assert_array_equal(logits(model), expected)
        with source.at_work():
            for _ in soak.rounds(MOST_ROUNDS):
                np.testing.assert_array_equal(logits(model), expected)
                if source.stats.discarded >= ENOUGH and not soak.seconds:
                    break
    assert source.stats.discarded > 0

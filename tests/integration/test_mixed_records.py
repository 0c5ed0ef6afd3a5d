"""Layers with records of different lengths share one kind of slot: nothing is planned anew, nothing is flushed."""

from __future__ import annotations

import random
from collections import OrderedDict

from rigs import Rig

from tierd.store.synthetic import make_store

LAYERS, EXPERTS, SLOTS = 4, 16, 16
SHORT, LONG = 32 << 10, 64 << 10


async def test_hits_are_those_of_a_queue_with_as_many_slots_whatever_the_lengths(tmp_path):
    store = make_store(
        tmp_path / "s", layers=LAYERS, experts=EXPERTS, top_k=2, fill="pattern", record_bytes=[SHORT, LONG] * 2
    )
    rng, ideal, hits = random.Random(7), OrderedDict(), 0
    async with Rig(store, slots=SLOTS) as rig:
        for _ in range(600):
            wanted = rng.randrange(LAYERS), min(int(rng.paretovariate(0.8)), EXPERTS) - 1
            hits += wanted in ideal
            ideal[wanted] = None
            ideal.move_to_end(wanted)
            if len(ideal) > SLOTS:
                ideal.popitem(last=False)
            await rig.fetch(*wanted)
        total = rig.broker.stats.total()
        assert (total.requests, total.hits) == (600, hits)
        assert hits > 200
        assert set(rig.broker.resident()) == {store.geometry.flat(*expert) for expert in ideal}
        assert rig.arena.counts().ready == SLOTS

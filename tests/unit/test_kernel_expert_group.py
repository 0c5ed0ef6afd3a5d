"""Experts that native code finds by their residency words: bits, misses, changes under use, and what is counted."""

from __future__ import annotations

import numpy as np
import pytest

from compute_node.engine.executor import Executor
from compute_node.kernels import (
    FORMATS,
    Batch,
    Binding,
    ExpertFFN,
    ExpertGroup,
    ExpertLayout,
    ExpertShape,
    QuantisedRows,
    Segment,
    from_float32,
    quantise_rows,
)
from tierd.errors import UsageError

HIDDEN, WIDTH, ROWS, CHOSEN, EXPERTS = 256, 200, 6, 3, 8
SLOT = 1 << 20


class World:
    """Eight experts in slots of memory, a table of words, and both ways to compute them."""

    def __init__(self, weight_format, numerics="exact", group_rows=ROWS, activation="silu"):
        rng = np.random.default_rng(1)
        self.x = rng.standard_normal((ROWS, HIDDEN)).astype(np.float32)
        self.batch, self.binding = Batch(ROWS), Binding()
        self.batch.set_rows(ROWS)
        self.indices = np.array([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(ROWS)], np.int32)
        quantised = QuantisedRows(ROWS, HIDDEN)
        quantise_rows("q", self.x, quantised, self.batch)()
        self.memory = np.zeros(EXPERTS * SLOT, np.uint8)
        self.layout = self._place(weight_format, rng, activation)
        self.words = np.arange(2, 2 + EXPERTS).astype(np.uint64) << 24 | np.arange(1, 1 + EXPERTS).astype(np.uint64)
        self.uses, self.last_step, self.step = (np.zeros(n, d) for n, d in ((10, "u4"), (10, "u4"), (1, "u8")))
        self.in_use = np.zeros(10, "u1")
        self.rows = np.full((ROWS, CHOSEN, HIDDEN), 7, np.float32)
        shape = ExpertShape("experts", self.x, self.rows, WIDTH, weight_format, numerics, quantised, activation)
        group = ExpertGroup(shape, self.indices, self.batch, self.binding, rows=group_rows, experts=EXPERTS)
        # The layer begins at flat number 2: the words before belong to another layer.
        self.table = np.concatenate([np.full(2, 9 << 24 | 1, np.uint64), self.words])
        self.ops = group.ops("layer 1", self.layout, start=2, experts=EXPERTS)
        self.segment = Segment("experts", self.ops)
        self.status = group.status
        self.binding.point(
            table=self.table.ctypes.data,
            payload=self.memory.ctypes.data,
            slot_bytes=SLOT,
            last_step=self.last_step.ctypes.data,
            uses=self.uses.ctypes.data,
            step_word=self.step.ctypes.data,
            in_use=self.in_use.ctypes.data,
        )
        self.binding.set_step((1 << 32) + 5)
        self.single = ExpertFFN(
            "expert", self.x, np.zeros_like(self.rows), intermediate=WIDTH, format=weight_format, numerics=numerics,
            quantised=quantised, activation=activation,
        )  # fmt: skip

    def _place(self, weight_format, rng, activation):
        places = {}
        for expert in range(EXPERTS):
            at = 0
            for part, shape in (("gate", (WIDTH, HIDDEN)), ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))):
                matrix = from_float32(rng.standard_normal(shape).astype(np.float32) / 8, weight_format)
                bias = None if activation == "silu" else rng.standard_normal(shape[0]).astype(np.float32)
                arrays = {f"{part}_data": matrix.data, f"{part}_scales": matrix.scales, f"{part}_bias": bias}
                for name, array in arrays.items():
                    places[name] = -1
                    if array is not None:
                        start = expert * SLOT + at
                        self.memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
                        places[name] = at
                        at += -(-array.nbytes // 64) * 64
        return ExpertLayout(weight_format, HIDDEN, WIDTH, **places, activation=activation)

    def expected(self, executor, rows):
        """The same rows, expert by expert."""
        out = self.single.shape.expert_rows
        for expert in range(EXPERTS):
            self.single.point(self.layout, self.memory.ctypes.data + expert * SLOT)
            places = [(r, s) for r in range(rows) for s in range(CHOSEN) if self.indices[r, s] == expert]
            self.single.assign([r for r, _ in places], [s for _, s in places])
            executor.run(self.single.segment)
        return out[:rows]

    def chosen(self, rows=ROWS):
        return sorted(set(self.indices[:rows].ravel().tolist()))

    def counted(self):
        return self.binding.used, self.binding.layers, self.binding.discarded


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("numerics", "weight_format"), [*(("exact", f) for f in FORMATS), ("fast", "int4-g64"), ("fast", "mxfp4")]
)
@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_group_gives_the_bits_of_experts_one_by_one(numerics, weight_format, rows, threads):
    world = World(weight_format, numerics)
    world.batch.set_rows(rows)
    with Executor(threads) as executor:
        assert executor.run(world.segment) == 4
        assert world.rows[:rows].tobytes() == world.expected(executor, rows).tobytes()
    assert (world.rows[rows:] == 7).all()


@pytest.mark.parametrize(("numerics", "weight_format"), [("exact", "bf16"), ("fast", "mxfp4")])
def test_biases_and_another_activation_give_the_bits_of_experts_one_by_one(numerics, weight_format):
    world = World(weight_format, numerics, activation="gpt-oss")
    with Executor(2) as executor:
        assert executor.run(world.segment) == 4
        assert world.rows.tobytes() == world.expected(executor, ROWS).tobytes()
    assert world.rows.any()


def test_uses_are_counted_where_they_belong():
    world = World("bf16")
    with Executor(1) as executor:
        for _ in range(2):
            executor.run(world.segment)
    assert world.uses.tolist() == [2 * (e - 2 in world.chosen()) for e in range(10)]
    assert world.last_step.tolist() == [5 * (e - 2 in world.chosen()) for e in range(10)]
    assert world.step[0] == (1 << 32) + 5
    assert world.counted() == (2 * len(world.chosen()), 2, 0)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_missing_expert_halts_before_anything_is_computed(threads):
    world = World("int8")
    absent = world.chosen()[1]
    world.table[2 + absent] = 0
    with Executor(threads) as executor:
        assert executor.run(world.segment) == 0
        assert world.status[0] == 1
        assert (world.rows == 7).all()
        assert world.counted() == (0, 0, 0)
        world.table[2 + absent] = world.words[absent]
        assert executor.run(world.segment) == 4
        assert world.rows.tobytes() == world.expected(executor, ROWS).tobytes()


def test_a_word_that_changed_under_use_discards_the_layer():
    world = World("f32")
    plan, gate_up, down, check = world.ops
    plan()
    for op in (gate_up, down):
        op()
    world.table[2 + world.chosen()[0]] += 1 << 24
    check()
    assert world.status[0] == 1
    assert not world.uses.any()
    assert world.counted() == (0, 0, 1)
    for op in world.ops:
        op()
    assert world.status[0] == 0
    assert world.counted() == (len(world.chosen()), 1, 1)


def test_experts_are_marked_while_they_are_in_use():
    world = World("f32")
    plan, gate_up, down, check = world.ops
    plan()
    assert world.in_use.tolist() == [e - 2 in world.chosen() for e in range(10)]
    for op in (gate_up, down, check):
        op()
    assert not world.in_use.any()
    # Nor does a mark stay behind a halt: for an expert that is missing, or a word that changed.
    plan()
    world.table[2 + world.chosen()[0]] = 0
    check()
    assert not world.in_use.any()
    plan()
    assert world.status[0] == 1
    assert not world.in_use.any()


def test_an_expert_in_another_slot_is_found_there():
    world = World("f32")
    with Executor(1) as executor:
        expected = world.expected(executor, ROWS).copy()
        memory = world.memory.reshape(EXPERTS, SLOT)
        memory[[0, 1]] = memory[[1, 0]]
        world.table[[2, 3]] = np.array([5 << 24 | 2, 6 << 24 | 1], np.uint64)
        executor.run(world.segment)
    assert world.rows.tobytes() == expected.tobytes()


def test_shapes_that_do_not_fit_are_refused():
    world = World("f32")
    shape = ExpertShape("e", world.x, world.rows, WIDTH, "f32")
    with pytest.raises(UsageError, match="group of 7 rows in buffers of 6"):
        ExpertGroup(shape, world.indices, world.batch, world.binding, rows=7, experts=EXPERTS)
    group = ExpertGroup(shape, world.indices, world.batch, world.binding, rows=2, experts=4)
    with pytest.raises(UsageError, match="8 experts in a group of at most 4"):
        group.ops("layer 0", world.layout, start=0, experts=8)
    with pytest.raises(UsageError, match="another shape or format"):
        group.ops("layer 0", World("bf16").layout, start=0, experts=4)

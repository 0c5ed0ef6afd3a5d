from __future__ import annotations

import mmap

import numpy as np
import pytest

from compute_node.engine.executor import Executor
from compute_node.kernels import FORMATS, ExpertFFN, ExpertLayout, dequantise, from_float32
from tierd.errors import LimitExceeded, UsageError

HIDDEN, WIDTH, ROWS, SLOTS = 96, 56, 6, 3


@pytest.fixture(scope="module")
def executor():
    with Executor(1) as one:
        yield one


def expert(weight_format, seed):
    rng = np.random.default_rng(seed)
    shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    return [from_float32(rng.standard_normal(s).astype(np.float32) / 8, weight_format) for s in shapes]


def network(weight_format, x, rows, **options):
    return ExpertFFN("expert", x, rows, intermediate=WIDTH, format=weight_format, **options)


@pytest.fixture
def x():
    return np.random.default_rng(9).standard_normal((ROWS, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_an_expert_matches_float64_and_writes_its_own_rows_only(weight_format, x, executor):
    rows = np.full((ROWS, SLOTS, HIDDEN), 5, np.float32)
    ffn = network(weight_format, x, rows)
    gate, up, down = expert(weight_format, 1)
    ffn.point_matrices(gate, up, down)
    ffn.assign([5, 0, 2, 3, 4], [1, 2, 0, 0, 1])
    executor.run(ffn.segment)
    written = {(5, 1), (0, 2), (2, 0), (3, 0), (4, 1)}
    for row in range(ROWS):
        g, u = dequantise(gate).astype(np.float64) @ x[row], dequantise(up).astype(np.float64) @ x[row]
        exact = dequantise(down).astype(np.float64) @ (g / (1 + np.exp(-g)) * u)
        for slot in range(SLOTS):
            if (row, slot) in written:
                assert np.abs(rows[row, slot] - exact).max() < 1e-5 * np.abs(exact).max()
            else:
                assert (rows[row, slot] == 5).all()


@pytest.mark.parametrize("weight_format", FORMATS)
def test_rows_together_or_alone_in_any_order_give_the_same_bits(weight_format, x, executor):
    rows, again = (np.zeros((ROWS, SLOTS, HIDDEN), np.float32) for _ in range(2))
    experts = [expert(weight_format, seed) for seed in range(SLOTS)]
    together, alone = network(weight_format, x, rows), network(weight_format, x, again)
    for slot, matrices in enumerate(experts):
        together.point_matrices(*matrices)
        together.assign(range(ROWS), [slot] * ROWS)
        executor.run(together.segment)
    for slot in (2, 0, 1):
        alone.point_matrices(*experts[slot])
        for row in reversed(range(ROWS)):
            alone.assign([row], [slot])
            executor.run_reference(alone.segment)
    assert rows.tobytes() == again.tobytes()


@pytest.mark.parametrize("weight_format", FORMATS)
def test_weights_in_a_mapping_give_the_bits_of_weights_in_arrays(weight_format, x, executor):
    matrices = expert(weight_format, 4)
    parts = [part for m in matrices for part in (m.data, m.scales)]
    places, size = [], 4096
    for part in parts:
        places.append(-1 if part is None else size)
        size += 0 if part is None else -(-part.nbytes // 64) * 64
    memory = mmap.mmap(-1, size)
    view = np.frombuffer(memory, np.uint8)
    for place, part in zip(places, parts, strict=True):
        if part is not None:
            view[place : place + part.nbytes] = part.reshape(-1).view(np.uint8)
    layout = ExpertLayout(weight_format, HIDDEN, WIDTH, *(p - 4096 if p >= 0 else -1 for p in places))
    assert size - 64 < 4096 + layout.size() <= size
    rows, again = (np.zeros((ROWS, SLOTS, HIDDEN), np.float32) for _ in range(2))
    mapped, plain = network(weight_format, x, rows), network(weight_format, x, again)
    mapped.point(layout, view.ctypes.data + 4096)
    plain.point_matrices(*matrices)
    for ffn in (mapped, plain):
        ffn.assign([1, 2], [0, 1])
        executor.run(ffn.segment)
    assert rows.any()
    assert rows.tobytes() == again.tobytes()


def test_assignments_outside_the_buffers_are_refused(x):
    ffn = network("f32", x, np.zeros((ROWS, SLOTS, HIDDEN), np.float32))
    ffn.point_matrices(*expert("f32", 1))
    for rows, slots in (([ROWS], [0]), ([-1], [0]), ([0], [SLOTS]), ([0], [-1])):
        with pytest.raises(LimitExceeded, match="outside 6 rows of 3"):
            ffn.assign(rows, slots)
    with pytest.raises(LimitExceeded, match="7 rows for one expert"):
        ffn.assign([0] * 7, [0] * 7)
    with pytest.raises(UsageError, match="2 rows but 1 places"):
        ffn.assign([0, 1], [0])


def test_a_refused_assignment_leaves_nothing_to_compute(x, executor):
    rows = np.zeros((ROWS, SLOTS, HIDDEN), np.float32)
    ffn = network("f32", x, rows)
    ffn.point_matrices(*expert("f32", 1))
    ffn.assign([0, 1], [0, 0])
    with pytest.raises(LimitExceeded):
        ffn.assign([3, 99], [0, 0])
    executor.run(ffn.segment)
    assert not rows.any()


def test_weights_of_another_shape_or_format_are_refused(x):
    ffn = network("f32", x, np.zeros((ROWS, SLOTS, HIDDEN), np.float32))
    gate, up, _ = expert("f32", 1)
    with pytest.raises(UsageError, match="f32 of 96 x 56 belongs"):
        ffn.point_matrices(gate, up, gate)
    with pytest.raises(UsageError, match="a bf16 matrix"):
        ffn.point_matrices(*expert("bf16", 1))
    with pytest.raises(UsageError, match="does not fit 96 x 56 in f32"):
        ffn.point(ExpertLayout("bf16", HIDDEN, WIDTH, 0, -1, 0, -1, 0, -1), 0)
    with pytest.raises(UsageError, match="no 'rough' kernel"):
        network("f32", x, np.zeros((ROWS, SLOTS, HIDDEN), np.float32), numerics="rough")


def test_an_expert_that_was_never_pointed_at_weights_is_not_computed(x, executor):
    rows = np.zeros((ROWS, SLOTS, HIDDEN), np.float32)
    ffn = network("f32", x, rows)
    executor.run(ffn.segment)
    with pytest.raises(UsageError, match="no weights"):
        ffn.assign([0], [0])
    assert not rows.any()


def biased_expert(weight_format, seed):
    """The bytes of an expert with biases, its layout, and what it is made from."""
    rng, places, at = np.random.default_rng(seed), {}, 0
    made = {}
    for name, matrix in zip(("gate", "up", "down"), expert(weight_format, seed), strict=True):
        bias = rng.standard_normal(matrix.rows).astype(np.float32) * 3
        made[name] = dequantise(matrix).astype(np.float64), bias
        for part, array in (("data", matrix.data), ("scales", matrix.scales), ("bias", bias)):
            places[f"{name}_{part}"] = -1 if array is None else at
            made[f"{name}_{part}"] = array
            at += 0 if array is None else -(-array.nbytes // 64) * 64
    memory = np.zeros(at, np.uint8)
    for name, place in places.items():
        if place >= 0:
            memory[place : place + made[name].nbytes] = made[name].reshape(-1).view(np.uint8)
    return memory, ExpertLayout(weight_format, HIDDEN, WIDTH, **places, activation="gpt-oss"), made


@pytest.mark.parametrize("weight_format", ["f32", "mxfp4"])
def test_biases_and_the_cut_activation_match_float64(weight_format, x, executor):
    memory, layout, made = biased_expert(weight_format, 3)
    assert memory.nbytes - 64 < layout.size() <= memory.nbytes
    rows = np.zeros((ROWS, SLOTS, HIDDEN), np.float32)
    ffn = network(weight_format, x * 8, rows, activation="gpt-oss")
    ffn.point(layout, memory.ctypes.data)
    ffn.assign(range(ROWS), [1] * ROWS)
    executor.run(ffn.segment)
    (gate, gate_bias), (up, up_bias), (down, down_bias) = made["gate"], made["up"], made["down"]
    g, u = (x * 8).astype(np.float64) @ gate.T + gate_bias, (x * 8).astype(np.float64) @ up.T + up_bias
    assert (g > 7).any()
    assert (np.abs(u) > 7).any()
    g, u = np.minimum(g, 7), np.clip(u, -7, 7)
    exact = ((u + 1) * g / (1 + np.exp(-1.702 * g))) @ down.T + down_bias
    assert np.abs(rows[:, 1] - exact).max() < 1e-5 * np.abs(exact).max()
    # Without biases the same network adds none, also after one that had them.
    ffn.point_matrices(*expert(weight_format, 3))
    executor.run(ffn.segment)
    g, u = (x * 8).astype(np.float64) @ gate.T, (x * 8).astype(np.float64) @ up.T
    g, u = np.minimum(g, 7), np.clip(u, -7, 7)
    exact = ((u + 1) * g / (1 + np.exp(-1.702 * g))) @ down.T
    assert np.abs(rows[:, 1] - exact).max() < 1e-5 * np.abs(exact).max()


def test_an_activation_without_a_kernel_or_of_another_network_is_refused(x):
    rows = np.zeros((ROWS, SLOTS, HIDDEN), np.float32)
    with pytest.raises(UsageError, match="no kernel for the activation 'model'"):
        network("f32", x, rows, activation="model")
    memory, layout, _ = biased_expert("f32", 1)
    with pytest.raises(UsageError, match="f32, gpt-oss does not fit 96 x 56 in f32, silu"):
        network("f32", x, rows).point(layout, memory.ctypes.data)

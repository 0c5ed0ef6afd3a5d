"""The orderings that the executor and the native reader of residency words rest on, in the code that is emitted."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numba import njit

from compute_node.kernels.threads import atomic_add, atomic_load, atomic_store, count_use, load_fence


def emitted(function, signature):
    """LLVM code of a function compiled for this signature."""
    compiled = njit(signature)(function)
    return next(iter(compiled.inspect_llvm().values()))


def look_twice(word, payload):
    first = atomic_load(word)
    value = atomic_load(payload)
    load_fence()
    return first == atomic_load(word), value


def hand_on(word, value):
    atomic_store(word, value)
    return atomic_add(word, 1)


def note(last_step, step, uses):
    count_use(last_step, step, uses)


def test_words_are_read_by_sequentially_consistent_loads_and_never_merged_into_one():
    code = emitted(look_twice, "Tuple((boolean, int64))(int64, int64)")
    assert len(re.findall(r"load atomic i64, .*? seq_cst", code)) >= 3
    assert "fence acquire" in code


def test_hand_overs_are_sequentially_consistent():
    code = emitted(hand_on, "int64(int64, int64)")
    assert re.search(r"store atomic i64 .*? seq_cst", code)
    assert re.search(r"atomicrmw add .*? seq_cst", code)


def test_a_use_is_counted_after_its_step_was_stored():
    code = emitted(note, "void(int64, int64, int64)")
    stores = [found.start() for found in re.finditer(r"store atomic i32 .*? release", code)]
    read = re.search(r"load atomic i32, .*? monotonic", code)
    assert len(stores) >= 2
    assert read is not None
    assert stores[0] < stores[1]


@pytest.mark.parametrize("value", [0, 1, 1 << 33])
def test_counting_stores_the_low_half_of_the_step_and_wraps(value):
    last, uses = np.full(2, 9, np.uint32), np.array([0xFFFFFFFF, 5], np.uint32)
    njit("void(int64, int64, int64)")(note)(last.ctypes.data, value, uses.ctypes.data)
    assert last.tolist() == [value & 0xFFFFFFFF, 9]
    assert uses.tolist() == [0, 5]

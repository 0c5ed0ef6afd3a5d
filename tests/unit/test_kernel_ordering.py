"""What the compiler emits for the words, the fence and the counters: in the order on which readers without locks rely.

The kernels are compiled anew here, since code from the cache cannot be looked at.
"""

from __future__ import annotations

import re

import pytest
from numba import njit, types

from compute_node.kernels import expert_group
from compute_node.kernels.lanes import i64_at
from compute_node.kernels.threads import atomic_load, load_fence

WORDS = types.CPointer(types.int64)
FENCE = "fence acquire"
WORD = "load atomic i64 seq_cst align 8"
STEP = COUNT = "store atomic i32 release align 4"
COUNTER = "load atomic i32 monotonic align 4"
MARK, UNMARK = "store i8 1", "store i8 0"


def emitted(function, signature):
    """Atomic accesses, fences and marks of a function, in the order of its optimised code; names left out."""
    compiled = njit(signature, error_model="numpy")(function)
    kinds = []
    for line in compiled.inspect_llvm(compiled.signatures[0]).splitlines():
        if found := re.search(r"fence \w+", line):
            kinds.append(found[0])
        elif found := re.search(r"load atomic (i\d+), ptr \S+ (\w+), (align \d+)", line):
            kinds.append(f"load atomic {found[1]} {found[2]} {found[3]}")
        elif found := re.search(r"store atomic (i\d+) \S+, ptr \S+ (\w+), (align \d+)", line):
            kinds.append(f"store atomic {found[1]} {found[2]} {found[3]}")
        elif found := re.search(r"store i8 (\d)", line):
            kinds.append(found[0])
    return kinds


@pytest.fixture(scope="module")
def check():
    return emitted(expert_group._check_kernel._pyfunc, (types.int64, types.int64, types.int64))


def test_the_words_are_looked_at_again_behind_a_fence(check):
    assert check[0] == FENCE
    assert check.count(FENCE) == 1
    assert WORD in check
    assert not [kind for kind in check if kind.startswith("load atomic i64") and kind != WORD]


def test_uses_are_counted_behind_the_words_and_each_behind_its_step(check):
    last_word = len(check) - 1 - check[::-1].index(WORD)
    counted = [kind for kind in check[last_word + 1 :] if kind not in (MARK, UNMARK)]
    assert not [kind for kind in check[:last_word] if "i32" in kind]
    assert len(counted) >= 3
    assert counted == [STEP, COUNTER, COUNT] * (len(counted) // 3)


def test_a_mark_is_set_before_its_word_is_loaded():
    found = emitted(expert_group._gather.py_func, (WORDS, WORDS, types.int64, WORDS))
    assert len(found) >= 2
    assert found == [MARK, WORD] * (len(found) // 2)


def test_without_the_intrinsics_none_of_this_is_there():
    """So the tests above look at what they mean to look at."""

    def plain(table, record):
        before = i64_at(table)[0]
        use = i64_at(record)[0]
        return use if i64_at(table)[0] == before else 0

    def ordered(table, record):
        before = atomic_load(table)
        use = i64_at(record)[0]
        load_fence()
        return use if atomic_load(table) == before else 0

    signature = (types.int64, types.int64)
    assert emitted(plain, signature) == []
    assert emitted(ordered, signature) == [WORD, FENCE, WORD]

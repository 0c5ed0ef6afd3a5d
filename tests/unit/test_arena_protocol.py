"""Every interleaving of readers and the writer of one slot, under the store buffers of x86 (x86-TSO).

A thread's stores go to its own buffer and reach memory later, in order; its loads see its own buffer first; a fence
waits until the buffer is empty. A device's transfers go straight to memory. The model follows Owens, Sarkar and Sewell,
"A better x86 memory model: x86-TSO" (2009). The slot holds expert A, is unpublished, filled with B and filled with A
again: the worst case for a reader that saw the word before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

Registers = dict[str, object]


@dataclass(frozen=True)
class Load:
    address: str
    register: str


@dataclass(frozen=True)
class Store:
    address: str
    value: Callable[[Registers], object]


@dataclass(frozen=True)
class Transfer:
    address: str
    value: object


@dataclass(frozen=True)
class Fence:
    pass


@dataclass(frozen=True)
class GoOnIf:
    """The thread ends here unless the condition holds."""

    condition: Callable[[Registers], bool]


@dataclass(frozen=True)
class Keep:
    """The thread keeps what it computed from these registers: all must hold A's bytes."""

    registers: tuple[str, ...]


@dataclass(frozen=True)
class Thread:
    program: tuple[object, ...]
    at: int = 0
    registers: tuple[tuple[str, object], ...] = ()
    buffer: tuple[tuple[str, object], ...] = ()


@dataclass
class Found:
    states: int = 0
    right: int = 0
    wrong: int = 0


def explore(memory: dict[str, object], *programs: tuple[object, ...]) -> Found:
    """Visit every reachable state once and count the right and the wrong results that a reader keeps."""
    found = Found()
    start = (cells_of(memory), tuple(Thread(program) for program in programs))
    seen, todo = {start}, [start]
    while todo:
        cells, threads = todo.pop()
        found.states += 1
        for number, thread in enumerate(threads):
            for changed_cells, changed in steps(dict(cells), thread, found):
                state = (changed_cells, (*threads[:number], changed, *threads[number + 1 :]))
                if state not in seen:
                    seen.add(state)
                    todo.append(state)
    return found


def steps(memory, thread, found):
    """All that one thread can do next: drain one store, or run one instruction."""
    if thread.buffer:
        address, value = thread.buffer[0]
        yield cells_of(memory | {address: value}), replace(thread, buffer=thread.buffer[1:])
    if thread.at < len(thread.program):
        yield from run(thread.program[thread.at], memory, replace(thread, at=thread.at + 1), found)


def run(instruction, memory, thread, found):
    registers = dict(thread.registers)
    match instruction:
        case Load(address, register):
            buffered = [value for a, value in thread.buffer if a == address]
            registers[register] = buffered[-1] if buffered else memory[address]
            yield cells_of(memory), replace(thread, registers=cells_of(registers))
        case Store(address, value):
            yield cells_of(memory), replace(thread, buffer=(*thread.buffer, (address, value(registers))))
        case Transfer(address, value):
            yield cells_of(memory | {address: value}), thread
        case Fence():
            if not thread.buffer:
                yield cells_of(memory), thread
        case GoOnIf(condition):
            yield cells_of(memory), thread if condition(registers) else replace(thread, at=len(thread.program))
        case Keep(names):
            right = all(registers[name] == "A" for name in names)
            found.right += right
            found.wrong += not right
            yield cells_of(memory), thread


def cells_of(cells):
    """A dictionary as a hashable part of a state."""
    return tuple(sorted(cells.items()))


MEMORY = {"word": 1, "low": "A", "high": "A", "shared": 0}
NOTHING: tuple[object, ...] = ()


def reader(*, check_after: bool = True, check_early: bool = False) -> tuple[object, ...]:
    check = (Load("word", "again"), GoOnIf(lambda r: r["again"] == r["word"]))
    return (
        Load("word", "word"),
        GoOnIf(lambda r: r["word"] != 0),
        Load("low", "low"),
        *(check if check_early else NOTHING),
        Load("high", "high"),
        *(check if check_after else NOTHING),
        Keep(("low", "high")),
    )


def writer(*, fence: bool = True, new_generation: bool = True, publish_early: bool = False) -> tuple[object, ...]:
    publish = (Fence(), Store("word", lambda _: 2 if new_generation else 1))
    return (
        Store("word", lambda _: 0),
        *((Fence(),) if fence else NOTHING),
        Transfer("low", "B"),
        Transfer("high", "B"),
        Transfer("low", "A"),
        *(publish if publish_early else NOTHING),
        Transfer("high", "A"),
        *(NOTHING if publish_early else publish),
    )


def test_no_interleaving_lets_a_reader_keep_a_wrong_byte():
    found = explore(MEMORY, reader(), writer())
    assert found.wrong == 0
    assert found.right > 0
    assert found.states > 100


def test_two_readers_and_a_writer_find_no_wrong_byte():
    found = explore(MEMORY, reader(), reader(), writer())
    assert found.wrong == 0
    assert found.right > 0


def test_a_second_thread_that_takes_the_word_from_the_first_and_checks_it_is_safe():
    leader = (
        Load("word", "word"),
        GoOnIf(lambda r: r["word"] != 0),
        Store("shared", lambda r: r["word"]),
        Load("low", "low"),
        Load("word", "again"),
        GoOnIf(lambda r: r["again"] == r["word"]),
        Keep(("low",)),
    )

    def helper(*, checks: bool) -> tuple[object, ...]:
        check = (Load("word", "again"), GoOnIf(lambda r: r["again"] == r["word"]))
        return (
            Load("shared", "word"),
            GoOnIf(lambda r: r["word"] != 0),
            Load("high", "high"),
            *(check if checks else NOTHING),
            Keep(("high",)),
        )

    assert explore(MEMORY, leader, helper(checks=True), writer()).wrong == 0
    assert explore(MEMORY, leader, helper(checks=False), writer()).wrong > 0


@pytest.mark.parametrize(
    ("broken_reader", "broken_writer"),
    [
        pytest.param(reader(), writer(fence=False), id="the writer's fence is removed"),
        pytest.param(reader(), writer(new_generation=False), id="the generation is used again"),
        pytest.param(reader(), writer(publish_early=True), id="the word is published before the last byte"),
        pytest.param(reader(check_after=False), writer(), id="the check after use is removed"),
        pytest.param(reader(check_after=False, check_early=True), writer(), id="the check stands before the last use"),
    ],
)
def test_the_explorer_finds_the_wrong_read_when(broken_reader, broken_writer):
    assert explore(MEMORY, broken_reader, broken_writer).wrong > 0


def test_the_model_has_store_buffers():
    """Two threads may both miss the other's store, unless both fence: the litmus test that tells TSO from SC."""

    def thread(mine: str, other: str, *, fence: bool) -> tuple[object, ...]:
        return (
            Store(mine, lambda _: "B"),
            *((Fence(),) if fence else NOTHING),
            Load(other, "seen"),
            GoOnIf(lambda r: r["seen"] == "A"),
            Store(f"{mine} missed", lambda _: 1),
            Fence(),
            Load(f"{other} missed", "both"),
            GoOnIf(lambda r: r["both"] == 1),
            Load("never", "never"),
            Keep(("never",)),
        )

    memory = {"x": "A", "y": "A", "x missed": 0, "y missed": 0, "never": 0}
    assert explore(memory, thread("x", "y", fence=False), thread("y", "x", fence=False)).wrong > 0
    assert explore(memory, thread("x", "y", fence=True), thread("y", "x", fence=True)).wrong == 0

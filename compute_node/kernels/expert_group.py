"""All experts of a layer at once, found by native code where they lie: the step needs no Python where all are resident.

Four ops. *plan* gathers the rows of each chosen expert, reads the experts' residency words and points records at them;
a word of 0 halts the run, and so does a wish to cancel. *gate-up* and *down* compute all of them together, so that
threads meet twice a layer instead of twice an expert. *check* reads the words again, behind the meeting of all threads
that computed: a changed one halts the run and nothing counts, else the uses are counted. After a halt the caller
computes the layer through `ExpertSource.visit`, which overwrites every row, and goes on behind *check*.

The discipline of the words is `tierd.client.source.DirectAccess`. Every thread's loads of weights come before its
atomic arrival at the meeting, and the second look at the words comes after it, by thread 0: one look for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numba import cfunc, njit
from numpy.typing import NDArray

from compute_node.kernels.batch import Batch
from compute_node.kernels.expert_records import (
    CODE,
    COLUMN_GRAIN,
    DOWN,
    EXPERT_FIELDS,
    GATE,
    PRODUCT,
    UP,
    ExpertLayout,
    ExpertShape,
    gate_up_rows,
    point_record,
)
from compute_node.kernels.lanes import i32_at, i64_at, u8_at
from compute_node.kernels.matmul import DATA, GRAIN, NEXT, X_INDEX, Y_INDEX, X, Y
from compute_node.kernels.op import KERNEL, Op, address_of, check_buffer, record
from compute_node.kernels.threads import atomic_load, atomic_store, call_kernel, count_use, load_fence
from tierd.errors import UsageError

__all__ = ["BINDING_WORDS", "Binding", "ExpertGroup"]

# Words of a binding.
TABLE, PAYLOAD, SLOT_BYTES, LAST_STEP, USES, STEP_WORD, IN_USE, STEP, USED, LAYERS, DISCARDED, CANCEL = range(12)
BINDING_WORDS: Final = 16

# Fields of the group's record, shared by its layers.
RECORDS, LIVE, COUNTS, SOURCES, TARGETS, EXPERTS, WORDS, STATUS, PLACES, BOUND = range(10)
GATE_ROWS, GATE_STRIDE, UP_ROWS, PRODUCT_ROWS, PRODUCT_BYTES, INDICES, INDEX_STRIDE, ROWS, CHOSEN = range(10, 19)
GROUP_WORDS: Final = 24

# Fields of a layer's record.
GROUP_RECORD, LAYER_START, LAYER_EXPERTS, OFFSETS = range(4)


class Binding:
    """Where the native step finds residency words and records now, and what it has counted; see `DirectAccess`.

    Attributes:
        words: int64 [BINDING_WORDS], read and written by the ops.
    """

    __slots__ = ("_cells", "words")

    def __init__(self) -> None:
        self.words = np.zeros(BINDING_WORDS, np.int64)
        self._cells = self.words.data  # reads and writes single words with a fraction of numpy's code

    def point(
        self, *, table: int, payload: int, slot_bytes: int, last_step: int, uses: int, step_word: int, in_use: int
    ) -> None:
        """Makes the next runs read there: addresses, and the bytes of a slot."""
        self.words[:STEP] = (table, payload, slot_bytes, last_step, uses, step_word, in_use)

    def set_step(self, step: int, cancel: int = 0) -> None:
        """The number of the next step, and the address of an int64 that stops it before a layer's experts; 0: none."""
        self._cells[STEP], self._cells[CANCEL] = step, cancel

    @property
    def used(self) -> int:
        """Experts that native code used, since the beginning."""
        return self._cells[USED]

    @property
    def layers(self) -> int:
        """Layers that it served."""
        return self._cells[LAYERS]

    @property
    def discarded(self) -> int:
        """Results that it threw away."""
        return self._cells[DISCARDED]


@njit(nogil=True, cache=True, error_model="numpy")
def _gather(g: Any, layer: Any, rows: int, bound: Any) -> int:
    """Numbers the chosen experts in router order, first choices of all rows first; returns how many lack."""
    experts, words, counts, places = i64_at(g[EXPERTS]), i64_at(g[WORDS]), i64_at(g[COUNTS]), i64_at(g[PLACES])
    in_use = u8_at(bound[IN_USE] + layer[LAYER_START])
    live, lacking = 0, 0
    for rank in range(g[CHOSEN]):
        for row in range(rows):
            expert = i32_at(g[INDICES] + row * g[INDEX_STRIDE])[rank]
            if places[expert] == 0:
                in_use[expert] = 1
                word = atomic_load(bound[TABLE] + (layer[LAYER_START] + expert) * 8)
                lacking += 1 if word == 0 else 0
                experts[live], words[live], counts[live] = expert, word, 0
                live += 1
                places[expert] = live
            counts[places[expert] - 1] += 1
    i64_at(g[LIVE])[0] = live
    return lacking


@njit(nogil=True, cache=True, error_model="numpy")
def _end_use(layer: Any, bound: Any, experts: Any, live: int) -> None:
    in_use = u8_at(bound[IN_USE] + layer[LAYER_START])
    for number in range(live):
        in_use[experts[number]] = 0


@njit(nogil=True, cache=True, error_model="numpy")
def _assign(g: Any, rows: int) -> None:
    """Lists the (row, place) pairs expert by expert and points the records at their parts of the buffers."""
    counts, places, chosen = i64_at(g[COUNTS]), i64_at(g[PLACES]), g[CHOSEN]
    first = 0
    for number in range(i64_at(g[LIVE])[0]):
        m = i64_at(g[RECORDS] + number * EXPERT_FIELDS * 8)
        gate, product = g[GATE_ROWS] + first * g[GATE_STRIDE], g[PRODUCT_ROWS] + first * g[PRODUCT_BYTES]
        m[GATE + Y], m[UP + Y] = gate, g[UP_ROWS] + first * g[GATE_STRIDE]
        m[GATE + X_INDEX], m[UP + X_INDEX] = g[SOURCES] + first * 8, g[SOURCES] + first * 8
        m[DOWN + Y_INDEX] = g[TARGETS] + first * 8
        m[DOWN + X] = gate if g[PRODUCT_ROWS] == 0 else product
        m[PRODUCT] = 0 if g[PRODUCT_ROWS] == 0 else product
        begin = first
        first += counts[number]
        counts[number] = begin  # for now: where the next pair goes
    sources, targets = i64_at(g[SOURCES]), i64_at(g[TARGETS])
    for rank in range(chosen):
        for row in range(rows):
            number = places[i32_at(g[INDICES] + row * g[INDEX_STRIDE])[rank]] - 1
            pair = counts[number]
            sources[pair], targets[pair] = row, row * chosen + rank
            counts[number] = pair + 1
    begin = 0
    for number in range(i64_at(g[LIVE])[0]):
        end = counts[number]
        counts[number] = end - begin
        begin = end


@cfunc(KERNEL, cache=True, error_model="numpy")
def _plan_kernel(args: int, _lo: int, _hi: int) -> None:
    """Finds the chosen experts; status is how many of them are not resident. Record: that of a layer.

    A step that is to be given up halts as if one expert were not resident, before anything is marked.
    """
    layer = i64_at(args)
    g = i64_at(layer[GROUP_RECORD])
    bound = i64_at(g[BOUND])
    if bound[CANCEL] != 0 and atomic_load(bound[CANCEL]) != 0:
        i64_at(g[LIVE])[0] = 0
        i64_at(g[STATUS])[0] = 1
        return
    rows = i64_at(g[ROWS])[0]
    atomic_store(bound[STEP_WORD], bound[STEP])
    lacking = _gather(g, layer, rows, bound)
    live, experts, words, places = i64_at(g[LIVE]), i64_at(g[EXPERTS]), i64_at(g[WORDS]), i64_at(g[PLACES])
    if lacking == 0:
        _assign(g, rows)
        for number in range(live[0]):
            address = bound[PAYLOAD] + ((words[number] & 0xFFFFFF) - 1) * bound[SLOT_BYTES]
            point_record(i64_at(g[RECORDS] + number * EXPERT_FIELDS * 8), i64_at(args + OFFSETS * 8), address)
        for number in range(live[0]):
            m = i64_at(g[RECORDS] + number * EXPERT_FIELDS * 8)
            following = i64_at(g[RECORDS] + (number + 1) % live[0] * EXPERT_FIELDS * 8)
            m[UP + NEXT], m[DOWN + NEXT] = following[GATE + DATA], following[DOWN + DATA]
    for number in range(live[0]):
        places[experts[number]] = 0
    if lacking != 0:
        _end_use(layer, bound, experts, live[0])
        live[0] = 0
    i64_at(g[STATUS])[0] = lacking


@njit(nogil=True, cache=True, error_model="numpy")
def _units_of(expert: int, live: int, lo: int, hi: int) -> Any:
    """Which units of its own an expert has among units lo..hi.

    Unit u of expert e has the number u * live + e: a slice holds the same columns of every expert. So threads have
    alike much to do, however unevenly the rows chose their experts.
    """
    return (lo - expert + live - 1) // live, (hi - expert + live - 1) // live


@cfunc(KERNEL, cache=True, error_model="numpy")
def _gate_up_kernel(args: int, lo: int, hi: int) -> None:
    """Record: address of records, intermediate, address of how many. One unit is 64 columns of one expert.

    Each slice begins with another expert: while one waits for the weights of an expert that few rows chose, the other
    computes on one that many chose, and they do not want the memory at the same moments.
    """
    m = i64_at(args)
    live = i64_at(m[2])[0]
    turn = lo // ((m[1] + COLUMN_GRAIN - 1) // COLUMN_GRAIN)
    for number in range(live):
        expert = (number + turn) % live
        first, end = _units_of(expert, live, lo, hi)
        if first < end:
            gate_up_rows(m[0] + expert * EXPERT_FIELDS * 8, first * COLUMN_GRAIN, min(end * COLUMN_GRAIN, m[1]))


@cfunc(KERNEL, cache=True, error_model="numpy")
def _down_kernel(args: int, lo: int, hi: int) -> None:
    """Record: address of records, hidden, address of how many. One unit is 16 columns of one expert.

    Slices begin as those of gate and up.
    """
    m = i64_at(args)
    live = i64_at(m[2])[0]
    turn = lo // ((m[1] + GRAIN - 1) // GRAIN)
    for number in range(live):
        expert = (number + turn) % live
        first, end = _units_of(expert, live, lo, hi)
        if first < end:
            part = m[0] + expert * EXPERT_FIELDS * 8
            call_kernel(i64_at(part)[CODE], part + DOWN * 8, first * GRAIN, min(end * GRAIN, m[1]))


@cfunc(KERNEL, cache=True, error_model="numpy")
def _check_kernel(args: int, _lo: int, _hi: int) -> None:
    """Looks at the words again; status is how many changed. If none did, counts the uses. Record: of a layer."""
    layer = i64_at(args)
    g = i64_at(layer[GROUP_RECORD])
    bound, experts, words = i64_at(g[BOUND]), i64_at(g[EXPERTS]), i64_at(g[WORDS])
    live = i64_at(g[LIVE])[0]
    load_fence()
    changed = 0
    for number in range(live):
        word = atomic_load(bound[TABLE] + (layer[LAYER_START] + experts[number]) * 8)
        changed += 1 if word != words[number] else 0
    _end_use(layer, bound, experts, live)
    i64_at(g[STATUS])[0] = changed
    if changed != 0:
        bound[DISCARDED] += changed
        return
    for number in range(live):
        flat = layer[LAYER_START] + experts[number]
        count_use(bound[LAST_STEP] + flat * 4, bound[STEP], bound[USES] + flat * 4)
    bound[USED] += live
    bound[LAYERS] += 1


class ExpertGroup:
    """The ops by which a step computes the routed experts of its layers, all of one shape and format.

    Args:
        shape: buffers and arithmetic.
        indices: int32 [max_rows, k], the router's choices.
        batch: the live rows; more than `rows` of them must not be run.
        binding: where experts are found.
        rows: most live rows.
        experts: most experts of a layer.
    """

    def __init__(
        self,
        shape: ExpertShape,
        indices: NDArray[np.int32],
        batch: Batch,
        binding: Binding,
        *,
        rows: int,
        experts: int,
    ) -> None:
        chosen = shape.slots
        check_buffer(shape.name, "indices", indices, (batch.max_rows, chosen), np.int32)
        if not 1 <= rows <= shape.max_rows:
            raise UsageError(f"{shape.name}: a group of {rows} rows in buffers of {shape.max_rows}")
        self.shape = shape
        self.status = np.zeros(1, np.int64)
        self._experts = experts
        pairs, most = rows * chosen, min(rows * chosen, experts)
        sources, targets, numbers, words, places = (np.zeros(n, np.int64) for n in (pairs, pairs, most, most, experts))
        records = shape.records(most, pairs, sources, targets)
        self._live = np.zeros(1, np.int64)
        g = np.zeros(GROUP_WORDS, np.int64)
        for field, array in (
            (RECORDS, records.table), (LIVE, self._live), (COUNTS, records.counts), (SOURCES, sources),
            (TARGETS, targets), (EXPERTS, numbers), (WORDS, words), (STATUS, self.status), (PLACES, places),
            (BOUND, binding.words), (GATE_ROWS, records.gate), (UP_ROWS, records.up), (INDICES, indices),
            (ROWS, batch.count),
        ):  # fmt: skip
            g[field] = address_of(array)
        g[GATE_STRIDE], g[INDEX_STRIDE], g[CHOSEN] = records.gate.strides[0], indices.strides[0], chosen
        if records.product is not None:
            g[PRODUCT_ROWS], g[PRODUCT_BYTES] = address_of(records.product.data), records.product.data.strides[0]
        self._record = g
        self._table = address_of(records.table)
        self._batch = batch
        self._keep = (records, sources, targets, numbers, words, places, indices, batch, binding, g, shape, self.status)

    def ops(self, name: str, layout: ExpertLayout, *, start: int, experts: int) -> Sequence[Op]:
        """Plan, gate-up, down and check of one layer.

        Args:
            name: of the layer.
            layout: where an expert's parts lie in its record.
            start: flat number of the layer's expert 0.
            experts: of the layer.
        """
        shape = self.shape
        if (layout.kind, layout.hidden, layout.intermediate) != (shape.kind, shape.hidden, shape.intermediate):
            raise UsageError(f"{name}: experts of another shape or format than their group's")
        if not 1 <= experts <= self._experts:
            raise UsageError(f"{name}: {experts} experts in a group of at most {self._experts}")
        args = record([
            address_of(self._record), start, experts, *layout.places(),
        ])  # fmt: skip
        live = address_of(self._live)
        up, down = record([self._table, shape.intermediate, live]), record([self._table, shape.hidden, live])
        keep = (self._keep, args, up, down)
        return (
            Op(
                f"{name} find experts", "plan", _plan_kernel.address, args, self._batch.count,
                units=1, per_row=False, grain=1, work=1, keep=keep, halt=self.status,
            ),
            Op(
                f"{name} experts gate_up", f"gate_up {shape.format}", _gate_up_kernel.address, up, self._live,
                units=-(-shape.intermediate // COLUMN_GRAIN), per_row=True, grain=1,
                work=2 * COLUMN_GRAIN * shape.hidden, keep=keep,
            ),
            Op(
                f"{name} experts down", f"down {shape.format}", _down_kernel.address, down, self._live,
                units=-(-shape.hidden // GRAIN), per_row=True, grain=1, work=GRAIN * shape.intermediate, keep=keep,
            ),
            Op(
                f"{name} check experts", "check", _check_kernel.address, args, self._batch.count,
                units=1, per_row=False, grain=1, work=1, keep=keep, halt=self.status,
            ),
        )  # fmt: skip

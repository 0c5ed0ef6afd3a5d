"""Flat numbering of experts, and refusal of everything that does not exist."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import LimitExceeded, StoreDamaged
from tierd.store.geometry import ExpertLayer, Geometry
from tierd.store.records import expert_layout

SMALL = expert_layout("f32", 32, 16)
LARGE = expert_layout("f32", 32, 16, record_bytes=16384)


def geometry(*layers, top_k=1, layouts=(SMALL, LARGE)):
    entries = tuple(ExpertLayer(layer=layer, experts=experts, layout=layout) for layer, experts, layout in layers)
    return Geometry(hidden_size=32, intermediate_size=16, top_k=top_k, layers=entries, layouts=layouts)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_flat_and_locate_are_inverse_and_dense(counts, step):
    described = geometry(*((number * step, count, number % 2) for number, count in enumerate(counts)))
    pairs = [(entry.layer, expert) for entry in described.layers for expert in range(entry.experts)]
    assert [described.flat(*pair) for pair in pairs] == list(range(described.experts_total))
    assert [described.locate(flat) for flat in range(described.experts_total)] == pairs
    assert [described.layer_start(entry.layer) for entry in described.layers] == [
        described.flat(entry.layer, 0) for entry in described.layers
    ]


def test_layers_may_differ_in_experts_and_record_size():
    described = geometry((1, 3, 0), (4, 5, 1))
    assert described.slot_bytes == 16384
    assert described.expert_bytes == 3 * SMALL.record_bytes + 5 * 16384
    assert described.layout(4) is LARGE
    assert described.experts_in(1) == 3


@pytest.mark.parametrize(
    ("layer", "expert"), [(0, 0), (2, 0), (-1, 0), (1 << 40, 0), (1, -1), (1, 3), (4, 5), (1, 1 << 31), (4, 1 << 70)]
)
def test_unknown_layers_and_experts_are_refused_by_number(layer, expert):
    with pytest.raises(LimitExceeded, match=f"layer {layer}"):
        geometry((1, 3, 0), (4, 5, 1)).flat(layer, expert)


@pytest.mark.parametrize("flat", [-1, 8, 1 << 64])
def test_unknown_flat_numbers_are_refused(flat):
    with pytest.raises(LimitExceeded, match=str(flat)):
        geometry((1, 3, 0), (4, 5, 1)).locate(flat)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "no layer"),
        (((2, 3, 0), (1, 3, 0)), "rising order"),
        (((1, 3, 0), (1, 3, 0)), "rising order"),
        (((1, 3, 2),), "names layout 2, which is not there"),
        (((0, 1 << 20, 0), (1, 1 << 20, 0), (2, 1 << 20, 0), (3, 1 << 20, 0), (4, 1, 0)), "more than"),
    ],
)
def test_impossible_geometries_are_refused(layers, message):
    with pytest.raises(StoreDamaged, match=message):
        geometry(*layers)


def test_more_chosen_experts_than_there_are_is_refused():
    with pytest.raises(StoreDamaged, match="top-4 of 3"):
        geometry((0, 3, 0), top_k=4)

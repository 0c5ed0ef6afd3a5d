"""Record layouts: where the parts lie, and views of them without copies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import StoreDamaged, UsageError
from tierd.store.formats import ExpertFormat
from tierd.store.records import RECORD_ALIGNMENT, RecordLayout, RecordPart, expert_layout

sizes = st.integers(1, 700)


@given(st.sampled_from(list(ExpertFormat)), sizes, sizes)
def test_parts_are_aligned_in_order_and_inside_the_record(expert_format, hidden, intermediate):
    layout = expert_layout(expert_format, hidden, intermediate)
    end = 0
    for part in layout.parts:
        assert part.offset % 64 == 0
        assert part.offset >= end
        end = part.offset + part.nbytes
    assert end <= layout.record_bytes < end + RECORD_ALIGNMENT
    assert layout.record_bytes % RECORD_ALIGNMENT == 0
    assert layout.weights == 3 * hidden * intermediate


@pytest.mark.parametrize(
    ("expert_format", "parts"),
    [
        ("f32", [("gate", "f32", (40, 96)), ("up", "f32", (40, 96)), ("down", "f32", (96, 40))]),
        ("bf16", [("gate", "bf16", (40, 96)), ("up", "bf16", (40, 96)), ("down", "bf16", (96, 40))]),
        (
            "int8",
            [
                ("gate", "i8", (40, 96)),
                ("gate.scales", "f32", (40,)),
                ("up", "i8", (40, 96)),
                ("up.scales", "f32", (40,)),
                ("down", "i8", (96, 40)),
                ("down.scales", "f32", (96,)),
            ],
        ),
        (
            "int4-g64",
            [
                ("gate", "u8", (40, 64)),
                ("gate.scales", "f16", (40, 2)),
                ("up", "u8", (40, 64)),
                ("up.scales", "f16", (40, 2)),
                ("down", "u8", (96, 64)),
                ("down.scales", "f16", (96, 2)),
            ],
        ),
        (
            "fp8-e4m3",
            [
                ("gate", "u8", (40, 96)),
                ("gate.scales", "f32", (1, 1)),
                ("up", "u8", (40, 96)),
                ("up.scales", "f32", (1, 1)),
                ("down", "u8", (96, 40)),
                ("down.scales", "f32", (1, 1)),
            ],
        ),
        (
            "mxfp4",
            [
                ("gate", "u8", (40, 64)),
                ("gate.scales", "u8", (40, 16)),
                ("up", "u8", (40, 64)),
                ("up.scales", "u8", (40, 16)),
                ("down", "u8", (96, 32)),
                ("down.scales", "u8", (96, 16)),
            ],
        ),
        (
            "int4-g32",
            [
                ("gate", "u8", (40, 64)),
                ("gate.scales", "bf16", (40, 16)),
                ("up", "u8", (40, 64)),
                ("up.scales", "bf16", (40, 16)),
                ("down", "u8", (96, 32)),
                ("down.scales", "bf16", (96, 16)),
            ],
        ),
    ],
)
def test_each_format_has_its_parts(expert_format, parts):
    layout = expert_layout(expert_format, 96, 40)
    assert [(part.name, part.dtype, part.shape) for part in layout.parts] == parts


def test_biases_follow_their_matrices_and_the_activation_is_part_of_the_layout():
    layout = expert_layout("mxfp4", 96, 40, activation="gpt-oss", biases=True)
    assert [(part.name, part.shape) for part in layout.parts if part.dtype == "f32"] == [
        ("gate.bias", (40,)), ("up.bias", (40,)), ("down.bias", (96,)),
    ]  # fmt: skip
    assert (layout.biases, layout.activation) == (True, "gpt-oss")
    assert layout != expert_layout("mxfp4", 96, 40, biases=True)
    with pytest.raises(StoreDamaged, match="activation 'relu'"):
        RecordLayout(layout.format, layout.parts, layout.record_bytes, "relu")


def test_int4_pads_columns_to_whole_blocks_of_128():
    layout = expert_layout("int4-g64", hidden_size=129, intermediate_size=128)
    assert layout.part("gate").shape == (128, 128)
    assert layout.part("gate.scales").shape == (128, 4)
    assert layout.part("down").shape == (129, 64)


@pytest.mark.parametrize(
    ("expert_format", "bytes_per_weight"),
    [
        ("f32", 4.0),
        ("bf16", 2.0),
        ("int8", 1 + 4 / 2048 / 3 + 8 / 1024 / 3),
        ("int4-g64", 0.5 + 2 / 64),
        ("fp8-e4m3", 1 + 4 / 128**2),
        ("mxfp4", 0.5 + 1 / 32),
        ("int4-g32", 0.5 + 2 / 32),
    ],
)
def test_bytes_per_weight_of_a_real_expert(expert_format, bytes_per_weight):
    layout = expert_layout(expert_format, hidden_size=2048, intermediate_size=1024)
    assert layout.bytes_per_weight == pytest.approx(bytes_per_weight, rel=2e-3)


def test_views_share_the_memory_of_the_buffer():
    layout = expert_layout("int8", 32, 16)
    buffer = np.zeros(layout.record_bytes, dtype=np.uint8)
    views = layout.views(buffer)
    views["down"][3, 5] = -7
    views["up.scales"][2] = 0.5
    assert buffer.view(np.int8)[layout.part("down").offset + 3 * 16 + 5] == -7
    assert layout.views(buffer.data)["up.scales"][2] == np.float32(0.5)


def test_views_of_read_only_memory_are_read_only():
    layout = expert_layout("bf16", 32, 16)
    views = layout.views(memoryview(bytes(layout.record_bytes)))
    assert views["gate"].dtype == np.uint16
    with pytest.raises(ValueError, match="read-only"):
        views["gate"][0, 0] = 1


def test_views_refuse_short_or_scattered_buffers():
    layout = expert_layout("f32", 32, 16)
    with pytest.raises(UsageError, match="buffer of 100 bytes"):
        layout.views(np.zeros(100, dtype=np.uint8))
    with pytest.raises(UsageError, match="contiguous"):
        layout.views(np.zeros(2 * layout.record_bytes, dtype=np.uint8)[::2])


@pytest.mark.parametrize(
    ("parts", "record_bytes", "message"),
    [
        ((RecordPart("gate", "f32", (4,), 0),), 4095, "not a multiple"),
        ((RecordPart("gate", "f32", (4,), 0),), 0, "not a multiple"),
        ((RecordPart("gate", "f64", (4,), 0),), 4096, "unknown dtype"),
        ((RecordPart("gate", "f32", (4,), 32),), 4096, "not aligned"),
        ((RecordPart("gate", "f32", (0,), 0),), 4096, "shape"),
        ((RecordPart("gate", "u8", (5000,), 0),), 4096, "parts end"),
        ((RecordPart("gate", "u8", (65,), 0), RecordPart("up", "u8", (4,), 64)), 4096, "overlaps"),
        ((RecordPart("gate", "u8", (4,), 0), RecordPart("gate", "u8", (4,), 64)), 4096, "same name"),
    ],
)
def test_impossible_layouts_are_refused(parts, record_bytes, message):
    with pytest.raises(StoreDamaged, match=message):
        RecordLayout("f32", parts, record_bytes)


def test_unknown_formats_and_sizes_are_refused():
    with pytest.raises(UsageError, match="unknown expert format 'int3'"):
        expert_layout("int3", 32, 16)
    with pytest.raises(UsageError, match="cannot be"):
        expert_layout("f32", 0, 16)
    with pytest.raises(UsageError, match="below"):
        expert_layout("f32", 64, 64, record_bytes=4096)

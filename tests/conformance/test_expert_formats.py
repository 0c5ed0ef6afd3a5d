"""What conversion writes and what kernels read is one layout: both sides give the same weights, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from compute_node.kernels.matrix import Matrix, dequantise
from tierd.checkpoint.quantise import bf16_to_f32, dequantise_int4, dequantise_int8
from tierd.store.formats import ExpertFormat
from tierd.store.number_formats import E2M1, E4M3, e8m0_to_f32, spread_blocks, spread_groups, unpack_nibbles
from tierd.store.synthetic import make_store


@pytest.mark.parametrize("expert_format", list(ExpertFormat))
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 32), (130, 65), (128, 256)])
def test_kernels_and_conversion_agree_on_every_format(tmp_path, expert_format, hidden, intermediate):
    store = make_store(
        tmp_path / "s", layers=1, experts=2, top_k=1, hidden=hidden, intermediate=intermediate, format=expert_format
    )
    views = store.layout(0).views(store.read_record(0, 1))
    for name, rows, cols in (
        ("gate", intermediate, hidden),
        ("up", intermediate, hidden),
        ("down", hidden, intermediate),
    ):
        scales = views.get(f"{name}.scales")
        matrix = Matrix(expert_format.value, rows, cols, views[name], scales)
        match expert_format:
            case ExpertFormat.F32:
                expected = views[name]
            case ExpertFormat.BF16:
                expected = bf16_to_f32(views[name])
            case ExpertFormat.INT8:
                expected = dequantise_int8(views[name], scales)
            case ExpertFormat.INT4_G64:
                expected = dequantise_int4(views[name], scales, cols)
            case ExpertFormat.FP8:
                expected = E4M3[views[name]] * spread_blocks(scales, rows, cols)
            case ExpertFormat.MXFP4:
                expected = E2M1[unpack_nibbles(views[name], cols)] * spread_groups(e8m0_to_f32(scales), cols)
            case ExpertFormat.INT4_G32:
                codes = unpack_nibbles(views[name], cols).astype(np.float32)
                expected = (codes - 8) * spread_groups(bf16_to_f32(scales), cols)
        assert np.array_equal(dequantise(matrix), expected)

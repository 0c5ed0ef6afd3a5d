from __future__ import annotations

import numpy as np
import pytest

from compute_node.engine.weights import Weights
from compute_node.kernels import FORMATS, dequantise, from_float32
from compute_node.kernels.matrix_rows import take_rows
from compute_node.models.delta_net_sizes import DeltaNetSizes
from tierd.errors import UsageError
from tierd.store.manifest import DenseTensorInfo
from tierd.store.store import DenseTensor


def matrix(weight_format, rows, cols=70):
    return from_float32(np.random.default_rng(rows).standard_normal((rows, cols)).astype(np.float32), weight_format)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_rows_keep_their_values_in_any_order(weight_format):
    whole = matrix(weight_format, 300)
    for order in (np.arange(300)[::-1], np.array([7]), np.concatenate([np.arange(128, 300), np.arange(128)])):
        part = take_rows(whole, order)
        assert (part.rows, part.cols) == (len(order), 70)
        assert dequantise(part).tobytes() == dequantise(whole)[order].tobytes()


def test_fp8_stays_fp8_where_blocks_stay_whole_and_is_widened_where_they_are_torn():
    whole = matrix("fp8-e4m3", 512)
    assert take_rows(whole, np.concatenate([np.arange(256, 384), np.arange(128)])).format == "fp8-e4m3"
    assert take_rows(whole, np.arange(64, 192)).format == "f32"
    assert take_rows(matrix("int8", 512), np.arange(64, 192)).format == "int8"


@pytest.mark.parametrize("order", [[], [0, 3], [-1]])
def test_rows_that_are_not_there_are_refused(order):
    with pytest.raises(UsageError, match="rows of a matrix are 0 to 2"):
        take_rows(matrix("f32", 3), np.array(order, np.int64))


def test_fused_projections_come_apart_as_the_reference_splits_them():
    sizes = DeltaNetSizes(
        key_heads=2, value_heads=6, key_width=3, value_width=4, taps=4, layers=frozenset({0}), fused=True
    )
    qkvz, own = np.arange(2 * (3 + 3 + 12 + 12)), 12
    by_head = qkvz.reshape(2, 30)
    expected = [by_head[:, :3], by_head[:, 3:6], by_head[:, 6 : 6 + own]]
    mixed, z = sizes.fused_order()
    assert mixed.tolist() == np.concatenate([part.ravel() for part in expected]).tolist()
    assert z.tolist() == by_head[:, 6 + own :].ravel().tolist()
    assert sizes.fused_rates_order().tolist() == [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]
    assert len(mixed) == sizes.channels


class OneTensor:
    """A store with one dense tensor."""

    def __init__(self, tensor):
        self.tensor, self.manifest = tensor, self
        self.dense = [
            DenseTensorInfo(
                name="w", dtype=tensor.dtype, shape=tensor.data.shape, shard=0, offset=0, nbytes=0, xxh3="0" * 16
            )
        ]

    def read_dense(self, name):
        assert name == "w"
        return self.tensor


def test_weights_are_read_once_and_taken_apart():
    data = np.arange(12, dtype=np.float32).reshape(4, 3)
    weights = Weights(OneTensor(DenseTensor(data, "f32", None)))
    odd, even = weights.parts("w", 4, 3, (np.array([1, 3]), np.array([0, 2])))
    assert odd.data.tolist() == data[1::2].tolist()
    assert even.data.tolist() == data[::2].tolist()
    assert weights.nbytes == data.nbytes
    assert Weights(OneTensor(DenseTensor(data[:, None], "f32", None))).array("w", (4, 1, 3)).shape == (4, 1, 3)

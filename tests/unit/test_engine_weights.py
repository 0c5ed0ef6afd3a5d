from __future__ import annotations

import numpy as np
import pytest

from compute_node.engine.weights import Weights
from tierd.errors import StoreDamaged, UnsupportedModel
from tierd.store.manifest import DenseTensorInfo
from tierd.store.store import DenseTensor


class FakeStore:
    def __init__(self, **tensors):
        self.tensors = tensors
        self.manifest = self
        self.dense = []
        for name, tensor in tensors.items():
            scales = None if tensor.scales is None else f"{name}.scales"
            self.dense += [self.info(name, tensor.dtype, tensor.data.shape, scales)]
            if scales:
                self.dense += [self.info(scales, "f32", tensor.scales.shape, None)]

    @staticmethod
    def info(name, dtype, shape, scales):
        return DenseTensorInfo(
            name=name, dtype=dtype, shape=shape, shard=0, offset=0, nbytes=0, xxh3="0" * 16, scales=scales
        )

    def read_dense(self, name):
        return self.tensors[name]


def f32(*shape):
    return DenseTensor(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), "f32", None)


def bf16(values):
    return DenseTensor((np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16), "bf16", None)


def test_matrices_keep_their_stored_format():
    codes = DenseTensor(np.ones((2, 3), np.int8), "i8", np.array([0.5, 2.0], np.float32))
    weights = Weights(FakeStore(a=f32(2, 3), b=bf16([[1.0, -2.0]]), c=codes))
    assert weights.matrix("a", 2, 3).format == "f32"
    assert weights.matrix("b", 1, 2).format == "bf16"
    matrix = weights.matrix("c", 2, 3)
    assert matrix.format == "int8"
    assert matrix.scales.tolist() == [0.5, 2.0]
    assert weights.nbytes == 24 + 4 + 6
    weights.finish(unused_allowed=set())


def test_vectors_are_widened_exactly():
    weights = Weights(FakeStore(a=f32(3), b=bf16([1.0, -0.5, 3.0])))
    assert weights.vector("a", 3).tolist() == [0.0, 1.0, 2.0]
    assert weights.vector("b", 3).tolist() == [1.0, -0.5, 3.0]
    assert weights.vector("b", 3).dtype == np.float32


def test_missing_and_misshapen_tensors_are_named():
    weights = Weights(FakeStore(a=f32(2, 3), c=DenseTensor(np.ones(2, np.int8), "i8", None)))
    with pytest.raises(StoreDamaged, match="no dense tensor b"):
        weights.matrix("b", 2, 3)
    with pytest.raises(StoreDamaged, match=r"a has the shape \[2, 3\].*\[3, 2\]"):
        weights.matrix("a", 3, 2)
    with pytest.raises(StoreDamaged, match="a has the shape"):
        weights.vector("a", 6)
    with pytest.raises(StoreDamaged, match="vector stored as i8"):
        weights.vector("c", 2)


def test_tensors_that_no_op_reads_are_refused():
    weights = Weights(FakeStore(a=f32(2, 3), extra=f32(1), head=f32(1)))
    weights.matrix("a", 2, 3)
    with pytest.raises(UnsupportedModel, match="extra"):
        weights.finish(unused_allowed={"head"})
    weights.finish(unused_allowed={"head", "extra"})

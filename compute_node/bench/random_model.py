"""Models of random weights in memory: dense tensors in int8, experts in any format, no file behind them.

They compute nonsense at full cost, and tokens choose experts of their own, as in a trained model: rows of the embedding
table are as large as what layers add, and codes stand for values that add up to nothing. Else what tokens share would
grow from layer to layer. Which dense tensors a family has is found by building its program once.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.kv_cache import KVCache
from compute_node.engine.weights import Weights
from compute_node.kernels import Matrix
from compute_node.models.decoder import build_program
from compute_node.models.registry import family_of
from tierd.checkpoint.config import Config
from tierd.checkpoint.registry import family_for
from tierd.errors import LimitExceeded, UsageError
from tierd.store.formats import DenseFormat, ExpertFormat
from tierd.store.geometry import ExpertLayer, Geometry
from tierd.store.manifest import DenseTensorInfo, Manifest, StoredFile, version_needed
from tierd.store.records import expert_layout
from tierd.store.store import DenseTensor
from tierd.store.synthetic import fill_scales, finite_fp8

__all__ = ["RandomModel", "dense_shapes"]

_POOL_BYTES: Final = 16 << 20
_CONFIG: Final = "config.json"
_EMBEDDING: Final = "model.embed_tokens.weight"
_ATTENTION: Final = ".o_proj.weight"


class _Recorder(Weights):
    """Notes what a program asks for and gives memory that is never touched."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def matrix(self, name: str, rows: int, cols: int) -> Matrix:
        """Any matrix of that shape."""
        self.shapes[name] = (rows, cols)
        return Matrix("f32", rows, cols, np.empty((rows, cols), np.float32))

    def parts(self, name: str, rows: int, cols: int, orders: Sequence[NDArray[np.int64]]) -> tuple[Matrix, ...]:
        """Any matrices of so many rows."""
        self.shapes[name] = (rows, cols)
        return tuple(Matrix("f32", len(o), cols, np.empty((len(o), cols), np.float32)) for o in orders)

    def array(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Any tensor of that shape."""
        self.shapes[name] = shape
        return np.zeros(shape, np.float32)

    def finish(self, *, unused_allowed: set[str], kept: tuple[str, ...] = ()) -> None:
        """Nothing was left over, since there was nothing."""


def dense_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the dense tensors of a model, by its config.json."""
    family, sizes = family_of(config)
    record = _Recorder()
    cache = KVCache(family.cache_layout(sizes), pages=1)
    build_program(sizes, family.decoder_layer, record, cache, rows=1, head_rows=1)
    return record.shapes


class RandomModel:
    """A store that exists in memory alone; what `InProcess` and `Model` ask of a store.

    Args:
        config: content of config.json.
        experts: format of the experts.
        seed: of the random bytes.
    """

    def __init__(self, config: Mapping[str, Any], *, experts: str = "int4-g64", seed: int = 0) -> None:
        _, sizes = family_of(config)
        self._config = json.dumps(dict(config)).encode()
        self._seed = seed
        pool = np.random.Generator(np.random.Philox(seed)).integers(0, 256, _POOL_BYTES, np.uint8)
        self._dense_codes = _centred(pool, ExpertFormat.INT8)
        self._expert_codes = _centred(pool, ExpertFormat(experts))
        self._shapes = dense_shapes(config)
        mapping = family_for(Config(config, _CONFIG))
        self._layout = expert_layout(
            ExpertFormat(experts),
            sizes.hidden_size,
            sizes.expert_width,
            activation=mapping.activation,
            biases=mapping.expert_biases,
        )
        geometry = Geometry(
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.expert_width,
            top_k=sizes.top_k,
            layers=tuple(ExpertLayer(layer=layer, experts=sizes.experts, layout=0) for layer in sizes.expert_layers),
            layouts=(self._layout,),
        )
        self.manifest = Manifest(
            format_version=version_needed(geometry, ()),
            family="",
            model_type=str(config["model_type"]),
            expert_format=ExpertFormat(experts),
            dense_format=DenseFormat.INT8,
            geometry=geometry,
            shards=(),
            dense_shards=(),
            dense=tuple(self._dense_infos()),
            index=StoredFile(name="index", bytes=0, sha256="0" * 64),
            files=(StoredFile(name=_CONFIG, bytes=len(self._config), sha256="0" * 64),),
            fingerprint="0" * 64,
        )

    @property
    def geometry(self) -> Geometry:
        """Of the experts."""
        return self.manifest.geometry

    @property
    def fingerprint(self) -> str:
        """Of a store that nobody else has."""
        return self.manifest.fingerprint

    @cached_property
    def dense_bytes_of_a_token(self) -> int:
        """Bytes of dense weights that a decode step reads: all but the embedding table, of which it reads one row."""
        tied = "lm_head.weight" not in self._shapes
        return sum(
            int(np.prod(shape)) * (1 if len(shape) == 2 else 4) + (4 * shape[0] if len(shape) == 2 else 0)
            for name, shape in self._shapes.items()
            if tied or "embed_tokens" not in name
        )

    @property
    def expert_bytes_of_a_token(self) -> int:
        """Bytes of routed experts that a decode step reads: weights and scales."""
        used = sum(part.nbytes for part in self._layout.parts)
        return used * self.geometry.top_k * len(self.geometry.layers)

    def read_file(self, name: str) -> bytes:
        """Config.json; UsageError for anything else."""
        if name != _CONFIG:
            raise UsageError(f"a model of random weights has no file {name}")
        return self._config

    def read_dense(self, name: str) -> DenseTensor:
        """An int8 matrix with row scales that keep its outputs near one and fit a float16; ones in any other shape.

        Rows of the embedding table are outputs themselves. What attention adds is an average over a text, which tokens
        share: it is kept small.
        """
        shape = self._shapes[name]
        if len(shape) != 2:
            return DenseTensor(dtype="f32", data=np.ones(shape, np.float32), scales=None)
        data = self._bytes(shape[0] * shape[1], zlib.crc32(name.encode()), self._dense_codes)
        size = 1 if name == _EMBEDDING else shape[1] ** -0.5 / (8 if name.endswith(_ATTENTION) else 1)
        spread = np.float16(size / 74)
        scales = np.full(shape[0], spread, np.float32)
        return DenseTensor(dtype="i8", data=data.view(np.int8).reshape(shape), scales=scales)

    def read_record(self, layer: int, expert: int) -> NDArray[np.uint8]:
        """A record of random codes and sensible scales."""
        record = self._bytes(self._layout.record_bytes, self.geometry.flat(layer, expert), self._expert_codes)
        kind, generator = ExpertFormat(self._layout.format), np.random.Generator(np.random.Philox(self._seed))
        for part, view in self._layout.views(record).items():
            if part.endswith(".bias"):
                view[...] = 0
                continue
            columns = self._layout.part(part.removesuffix(".scales")).shape[1]
            if part.endswith(".scales"):
                fill_scales(view, np.float32((3 * columns) ** -0.5), kind, generator)  # codes are spread evenly
            elif view.dtype == np.float32:
                raise LimitExceeded("random experts are in any format but f32")
            elif view.dtype == np.uint16:
                view[...] = view & 0xBFFF  # no exponent that overflows
            elif kind is ExpertFormat.FP8:
                finite_fp8(view)
        return record

    def _bytes(self, count: int, key: int, pool: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Random bytes that belong to `key`: the pool over and over, each time from elsewhere."""
        generator = np.random.Generator(np.random.Philox(key=[self._seed, key]))
        out = np.empty(count, np.uint8)
        for start in range(0, count, _POOL_BYTES // 2):
            part = out[start : start + _POOL_BYTES // 2]
            skip = int(generator.integers(0, _POOL_BYTES // 2))
            part[...] = pool[skip : skip + len(part)]
        return out

    def _dense_infos(self) -> list[DenseTensorInfo]:
        infos = []
        for name, shape in self._shapes.items():
            matrix = len(shape) == 2
            scales = f"{name}.scales" if matrix else None
            if scales is not None:
                infos.append(self._info(scales, "f32", shape[:1], None))
            infos.append(self._info(name, "i8" if matrix else "f32", shape, scales))
        return infos

    @staticmethod
    def _info(name: str, dtype: str, shape: tuple[int, ...], scales: str | None) -> DenseTensorInfo:
        size = int(np.prod(shape)) * (1 if dtype == "i8" else 4)
        return DenseTensorInfo.model_validate({
            "name": name, "dtype": dtype, "shape": shape, "shard": 0, "offset": 0, "nbytes": size,
            "xxh3": "0" * 16, "scales": scales,
        })  # fmt: skip


def _centred(pool: NDArray[np.uint8], kind: ExpertFormat) -> NDArray[np.uint8]:
    """Random bytes of which the lowest code has become zero, where codes reach further below than above it."""
    found = pool.copy()
    if kind is ExpertFormat.INT8:
        found[found == 0x80] = 0
    elif kind in {ExpertFormat.INT4_G64, ExpertFormat.INT4_G32}:
        found |= ((found & 0x0F) == 0).astype(np.uint8) << 3
        found |= (found < 0x10).astype(np.uint8) << 7
    return found

"""Stores on disk with the sizes of real models and random weights, made once and kept in the user's cache."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compute_node.bench.geometries import BenchGeometry
from compute_node.bench.random_model import dense_shapes
from compute_node.models.registry import family_of
from tierd.checkpoint.config import Config
from tierd.checkpoint.registry import family_for
from tierd.errors import UsageError
from tierd.sizes import format_bytes
from tierd.state import cache_directory
from tierd.store.formats import ExpertFormat
from tierd.store.records import expert_layout
from tierd.store.store import ExpertStore
from tierd.store.synthetic import make_store

__all__ = ["random_store"]

_SEED = 7
_LINES: Final = 20
"""Of progress, about so many."""


def random_store(
    geometry: BenchGeometry,
    *,
    layers: int,
    experts: int | None = None,
    experts_format: str = "int4-g64",
    tell: Callable[[str], None] = lambda _line: None,
) -> ExpertStore:
    """The store; written at the first call.

    Args:
        geometry: of which model.
        layers: how many layers of it.
        experts: routed experts of a layer; None: all.
        experts_format: of the experts; dense weights are bf16.
        tell: takes a line now and then while the store is written.

    Raises:
        UsageError: more than the model has, an unknown format, or no room on the disk of the cache.
    """
    config = geometry.cut(layers, experts)
    if experts_format not in tuple(ExpertFormat):
        raise UsageError(f"unknown format {experts_format!r}", hint=f"Known: {', '.join(ExpertFormat)}.")
    _, sizes = family_of(config)
    cache = cache_directory() / "bench"
    path = cache / f"{geometry.name}-{layers}x{sizes.experts}-{experts_format}"
    if path.exists():
        return ExpertStore.open(path)
    cache.mkdir(parents=True, exist_ok=True)
    shapes = dense_shapes(config)
    mapping = family_for(Config(config, geometry.name))
    kind: dict[str, Any] = {"activation": mapping.activation, "biases": mapping.expert_biases}
    record = expert_layout(ExpertFormat(experts_format), sizes.hidden_size, sizes.expert_width, **kind).record_bytes
    needed = record * sizes.experts * layers + sum(2 * int(np.prod(shape)) for shape in shapes.values())
    free = shutil.disk_usage(cache).free
    if free < needed:
        raise UsageError(
            f"the store of the bench takes {format_bytes(needed)}, {cache} has {format_bytes(free)} left",
            hint="Give fewer --layers, or set XDG_CACHE_HOME to a larger disk.",
        )

    def wrote(done: int, every: int) -> None:
        if done == every or done % max(1, every // _LINES) == 0:
            tell(f"{done} of {every} experts are written, {format_bytes(done * record)} of {format_bytes(needed)}")

    with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as scratch:
        made = Path(scratch) / "store"
        make_store(
            made,
            layers=sizes.expert_layers,
            experts=sizes.experts,
            top_k=sizes.top_k,
            hidden=sizes.hidden_size,
            intermediate=sizes.expert_width,
            format=experts_format,
            **kind,
            dense=_dense(shapes),
            config=config,
            wrote=wrote,
        )
        made.rename(path)
    return ExpertStore.open(path)


def _dense(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[Any]]:
    """Bits of bf16: matrices that keep their outputs near one, and ones in any other shape."""
    rng = np.random.Generator(np.random.Philox(key=_SEED))
    dense = {}
    for name, shape in shapes.items():
        if len(shape) != 2:
            dense[name] = np.full(shape, 0x3F80, np.uint16)
        else:
            values = rng.standard_normal(shape, dtype=np.float32) * np.float32(shape[1] ** -0.5)
            dense[name] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return dense

"""Small checkpoints of any known family with random weights, in the published form: for tests and measurements."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tierd.checkpoint.config import Config
from tierd.checkpoint.mapping import ModelShape, StackedForm
from tierd.checkpoint.quantise import bf16_to_f32, f32_to_bf16
from tierd.checkpoint.registry import family_for
from tierd.errors import UsageError
from tierd.store.manifest import CONFIG_FILE
from tierd.store.shards import encode_header

__all__ = ["make_checkpoint"]


def make_checkpoint(
    path: Path | str,
    config: Mapping[str, Any],
    *,
    dtype: str = "BF16",
    shards: int = 1,
    index: bool = True,
    stacked_layers: Collection[int] = (),
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Writes config.json and safetensors files with random weights.

    Args:
        path: a new directory.
        config: content of config.json.
        dtype: "F32", "BF16" or "F16", of all tensors.
        shards: files to spread the tensors over, in order of name.
        index: write `model.safetensors.index.json` when there are several files.
        stacked_layers: layers whose experts are published as stacked tensors instead of one by one.
        seed: of the weights; a tensor's weights depend on seed, shape and position alone.

    Returns:
        The weights by published name, widened to float32.
    """
    root = Path(path)
    root.mkdir(parents=True)
    (root / CONFIG_FILE).write_text(json.dumps(config, indent=2))
    described = Config(config, str(root / CONFIG_FILE))
    generator = np.random.Generator(np.random.Philox(key=seed))
    stored: dict[str, np.ndarray] = {}
    for name, shape in _shapes(described, stacked_layers).items():
        weights = generator.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5)
        stored[name] = _narrow(weights, dtype)
    names = sorted(stored)
    share = -(-len(names) // shards)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        mine = names[number * share : (number + 1) * share]
        file = "model.safetensors" if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        header = encode_header(((name, dtype, stored[name].shape) for name in mine), alignment=8)
        with (root / file).open("wb") as out:
            out.write(header.raw)
            out.writelines(stored[name].tobytes() for name in mine)
        weight_map |= dict.fromkeys(mine, file)
    if index and shards > 1:
        (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return {name: _widen(array) for name, array in stored.items()}


def _shapes(config: Config, stacked_layers: Collection[int]) -> dict[str, tuple[int, ...]]:
    mapping = family_for(config)
    shape = mapping.shape(config)
    hidden, width = shape.hidden_size, shape.intermediate_size
    shapes = {name: spec.shape for name, spec in mapping.dense(config).items()}
    for layer, experts in shape.layers.items():
        if layer in stacked_layers or not mapping.expert:
            shapes |= _stacked(mapping.fused[0], layer, experts, shape)
            continue
        for expert in range(experts):
            gate, up, down = (name.format(layer=layer, expert=expert) for name in mapping.expert)
            shapes |= {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}
    return shapes


def _stacked(form: StackedForm, layer: int, experts: int, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    hidden, both = shape.hidden_size, 2 * shape.intermediate_size
    sizes = ((both, hidden), (hidden, shape.intermediate_size))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, size in zip((form.gate_up, form.down), sizes, strict=True):
        shapes[name.format(layer=layer)] = (experts, *(size[::-1] if form.transposed else size))
    for name, size in zip(form.biases or (), sizes, strict=False):
        shapes[name.format(layer=layer)] = (experts, size[0])
    return shapes


def _narrow(weights: np.ndarray, dtype: str) -> np.ndarray:
    match dtype:
        case "F32":
            return weights
        case "BF16":
            return f32_to_bf16(weights)
        case "F16":
            return weights.astype(np.float16)
        case _:
            raise UsageError(f"unknown dtype {dtype!r}", hint="Known: F32, BF16, F16.")


def _widen(stored: np.ndarray) -> np.ndarray:
    return bf16_to_f32(stored) if stored.dtype == np.uint16 else stored.astype(np.float32)

"""Quantise an oracle folder as published checkpoints are: codes and scales under the published names.

    python tests/oracles/quantise_folder.py SOURCE CODES VALUES --coding fp8 [--scales ue8m0]

needs numpy alone. CODES gets the weights in codes, with `quantization_config`; VALUES the same weights as float32, the
value of each code times its scale, under the names that transformers reads: what an oracle is computed from. The
codings:

    fp8     matrices of experts, attention and shared experts as F8_E4M3, `_scale_inv` per 128 x 128 (F32 or UE8M0)
    mxfp4   stacked experts as `_blocks` and `_scales`, rows of gate and up taking turns (gpt-oss)
    int4    experts as `weight_packed`, `weight_scale` (BF16, per 32 columns) and `weight_shape` (Kimi K2)

Everything else is rounded to BF16, the correction of routers stays as it is. No code of the project is used: the two
must agree.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np

FP8_MAGNITUDES = [(m / 8) * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][
    :127
]
FP4_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")
STACKED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
DENSE_IN_FP8 = re.compile(
    r"\.(self_attn|mlp|shared_experts|shared_expert)\.\w+\.weight$"
    r"|\.linear_attn\.(in_proj_qkvz|in_proj_qkv|in_proj_z|out_proj)\.weight$"
)
BYTES = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I32": 4, "I64": 8}

Tensors = dict[str, tuple[str, np.ndarray]]
"""safetensors dtype and array of each tensor; types that numpy lacks as unsigned numbers of their bits."""


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """The float32 tensors of a folder by name."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                if entry["dtype"] != "F32":
                    raise SystemExit(f"{path}: {name} is {entry['dtype']}; folders of float32 are quantised")
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                found[name] = np.frombuffer(data[begin:end], "<f4").reshape(entry["shape"])
    return found


def write_folder(folder: Path, source: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    """Writes config.json, one safetensors file, and the small files beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in source.iterdir():
        if path.suffix == ".json" and path.name not in {"config.json", "tensors.json"}:
            shutil.copy(path, folder)
    table, position = {}, 0
    for name, (dtype, array) in tensors.items():
        end = position + array.size * BYTES[dtype]
        table[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def nearest(values: np.ndarray, magnitudes: list[float], sign: int) -> np.ndarray:
    """The code of the nearest magnitude, with the bit `sign` for negative values."""
    known = np.array(magnitudes)
    codes = np.abs(np.abs(values)[..., None] - known).argmin(-1).astype(np.uint8)
    return np.where(values < 0, codes | sign, codes).astype(np.uint8)


def bf16(values: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat16 of finite values."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def quantise_fp8(weights: np.ndarray, scales: str) -> tuple[Tensors, np.ndarray]:
    """Codes and scales by suffix, and the values that they stand for."""
    rows, cols = weights.shape
    grid = np.zeros((-(-rows // 128), -(-cols // 128)), np.float32)
    for i, j in np.ndindex(grid.shape):
        grid[i, j] = np.abs(weights[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]).max() / 448
    stored: tuple[str, np.ndarray] = ("F32", grid)
    if scales == "ue8m0":
        exponents = np.ceil(np.log2(grid)).astype(int)
        grid = (2.0**exponents).astype(np.float32)
        stored = ("F8_E8M0", (exponents + 127).astype(np.uint8))
    spread = np.kron(grid, np.ones((128, 128), np.float32))[:rows, :cols]
    codes = nearest(weights / spread, FP8_MAGNITUDES, 128)
    values = np.where(codes & 128, -1, 1) * np.array([*FP8_MAGNITUDES, np.nan])[codes & 127]
    return {"": ("F8_E4M3", codes), "_scale_inv": stored}, (values.astype(np.float32) * spread).astype(np.float32)


def quantise_fp4(weights: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """Codes and scales of [experts, outputs, inputs] by suffix, and the values that they stand for."""
    experts, outputs, inputs = weights.shape
    groups = weights.reshape(experts, outputs, inputs // 32, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))).astype(int) - 2
    scale = (2.0**exponents)[..., None]
    codes = nearest(groups / scale, FP4_MAGNITUDES, 8)
    values = np.where(codes & 8, -1, 1) * np.array(FP4_MAGNITUDES)[codes & 7] * scale
    stored: Tensors = {
        "_blocks": ("U8", codes[..., 0::2] | codes[..., 1::2] << 4),
        "_scales": ("U8", (exponents + 127).astype(np.uint8)),
    }
    return stored, values.reshape(weights.shape).astype(np.float32)


def quantise_int4(weights: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """Codes and scales by suffix, and the values that they stand for."""
    rows, cols = weights.shape
    padded = np.zeros((rows, -(-cols // 32) * 32), np.float32)
    padded[:, :cols] = weights
    groups = padded.reshape(rows, -1, 32)
    scales = bf16(np.abs(groups).max(-1) / 7)
    wide = (scales.astype(np.uint32) << 16).view(np.float32)[..., None]
    codes = np.clip(np.rint(groups / wide), -8, 7).astype(int) + 8
    values = (codes - 8).astype(np.float32) * wide
    nibbles = codes.reshape(rows, -1)[:, : -(-cols // 8) * 8].astype(np.uint32).reshape(rows, -1, 8)
    packed = (nibbles << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    stored: Tensors = {
        "_packed": ("I32", packed),
        "_scale": ("BF16", scales),
        "_shape": ("I64", np.array([rows, cols], np.int64)),
    }
    return stored, values.reshape(rows, -1)[:, :cols].astype(np.float32)


def in_fp8(name: str) -> bool:
    """True for matrices that published checkpoints have in fp8: not routers, embeddings and heads."""
    return bool(EXPERT.search(name) or DENSE_IN_FP8.search(name)) and not name.endswith(".gate.weight")


def quantise(weights: dict[str, np.ndarray], coding: str, scales: str) -> tuple[Tensors, Tensors]:
    """The tensors in codes, and the same as values."""
    codes: Tensors = {}
    values: Tensors = {}
    for name, array in weights.items():
        made: Tensors | None = None
        value = array
        if coding == "fp8" and array.ndim == 2 and in_fp8(name):
            made, value = quantise_fp8(array, scales)
        elif coding == "int4" and EXPERT.search(name):
            made, value = quantise_int4(array)
        elif coding == "mxfp4" and STACKED.search(name):
            made, value = quantise_fp4(np.swapaxes(array, 1, 2))  # saved as [experts, inputs, outputs]
            value = np.ascontiguousarray(np.swapaxes(value, 1, 2))
        if made is None and not name.endswith("correction_bias"):
            made = {"": ("BF16", bf16(array))}
            value = (made[""][1].astype(np.uint32) << 16).view(np.float32)
        codes |= {name: ("F32", array)} if made is None else {f"{name}{end}": made[end] for end in made}
        values[name] = ("F32", value)
    return codes, values


def configuration(coding: str, scales: str) -> dict[str, Any]:
    """The `quantization_config` of a published checkpoint."""
    if coding == "fp8":
        extra = {"scale_fmt": "ue8m0"} if scales == "ue8m0" else {}
        return {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        } | extra  # fmt: skip
    if coding == "mxfp4":
        return {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"}
    weights = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
        "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
    }  # fmt: skip
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group}, "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
    }  # fmt: skip


def quantise_folder(source: Path, codes: Path, values: Path, *, coding: str, scales: str = "f32") -> None:
    """Makes the two folders."""
    config = json.loads((source / "config.json").read_text())
    in_codes, in_values = quantise(read_folder(source), coding, scales)
    write_folder(codes, source, in_codes, config | {"quantization_config": configuration(coding, scales)})
    write_folder(values, source, in_values, config)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Quantise an oracle folder as published checkpoints are.")
    parser.add_argument("source", type=Path)
    parser.add_argument("codes", type=Path)
    parser.add_argument("values", type=Path)
    parser.add_argument("--coding", choices=("fp8", "mxfp4", "int4"), required=True)
    parser.add_argument("--scales", choices=("f32", "ue8m0"), default="f32", help="of fp8")
    arguments = parser.parse_args()
    quantise_folder(
        arguments.source, arguments.codes, arguments.values, coding=arguments.coding, scales=arguments.scales
    )


if __name__ == "__main__":
    main()

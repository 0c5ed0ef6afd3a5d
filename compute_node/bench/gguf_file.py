"""A model of random weights as a GGUF: the very same weights, so that llama.cpp does the same work.

Experts become Q4_0 and other matrices Q8_0. Their blocks of 32 get the scale of the group or row that they lie in, so
nothing is rounded anew; the router, which has to be float32 there, is written out. Needs the package `gguf`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierd.client.in_process import RecordStore
from tierd.errors import LimitExceeded, UsageError
from tierd.extras import install_hint

__all__ = ["ARCHITECTURES", "byte_tokens", "q4_blocks", "q8_blocks", "write_gguf"]

ARCHITECTURES: Final = {"olmoe": "olmoe", "qwen3_moe": "qwen3moe"}
"""Names of families here and in GGUF."""
_LAYER: Final = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
"""Names of a layer's dense tensors in GGUF and in checkpoints; both turn halves of heads against each other."""

_BLOCK: Final = 32
"""Weights of a block, which follow its float16 scale: half a byte each in Q4_0, a byte in Q8_0."""
_HALF: Final = np.dtype("V16")
_Q4_BLOCK: Final = np.dtype([("scale", np.float16), ("codes", _HALF)])
_LOW, _HIGH, _FOUR = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0), np.uint64(4)
_EXPERT_PARTS: Final = ("gate", "up", "down")


def byte_tokens() -> list[str]:
    """The 256 characters by which byte-level BPE writes bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    found, stand_ins = [], 0
    for byte in range(256):
        found.append(chr(byte if byte in plain else 256 + stand_ins))
        stand_ins += byte not in plain
    return found


def q4_blocks(packed: NDArray[np.uint8], scales: NDArray[np.float16], cols: int) -> NDArray[np.uint8]:
    """Q4_0 of an `int4-g64` matrix.

    A byte of a block holds one weight of the block's first half below and one of its second half above, both as codes
    0 to 15 that stand for code minus 8, as here.

    Args:
        packed: uint8 [rows, cols / 2], see `compute_node.kernels.matrix`.
        scales: float16 [rows, cols / 64].
        cols: of the matrix, a multiple of 128.

    Returns:
        uint8 [rows, bytes of a row].
    """
    rows, pairs = len(packed), cols // 128
    halves = np.ascontiguousarray(packed).view(_HALF).reshape(rows, pairs, 2, 2)
    first, second = (np.ascontiguousarray(halves[..., place]).view(np.uint64) for place in range(2))
    found = np.empty((rows, pairs, 2, 2), _Q4_BLOCK)
    found["scale"] = scales.reshape(rows, pairs, 2, 1)
    for group, codes in enumerate((first & _LOW | second << _FOUR & _HIGH, first >> _FOUR & _LOW | second & _HIGH)):
        found["codes"][:, :, group] = codes.view(_HALF).reshape(rows, pairs, 2)
    return found.view(np.uint8).reshape(rows, -1)


def q8_blocks(codes: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Q8_0 of an `int8` matrix, int8 [rows, cols] and float32 [rows] of scales that float16 can hold."""
    rows, cols = codes.shape
    narrow = scales.astype(np.float16)
    if not np.array_equal(narrow.astype(np.float32), scales):
        raise LimitExceeded("a scale of an int8 matrix is no float16, as GGUF wants it")
    found = np.empty((rows, cols // _BLOCK, 2 + _BLOCK), np.uint8)
    found[..., :2] = narrow.view(np.uint8).reshape(rows, 1, 2)
    found[..., 2:] = codes.view(np.uint8).reshape(rows, -1, _BLOCK)
    return found.reshape(rows, -1)


def write_gguf(path: Path, model: RecordStore, tell: Callable[[str], None] = lambda _line: None) -> None:
    """Writes the file.

    Args:
        path: of the file; replaced.
        model: an OLMoE or Qwen3-MoE one with experts in int4-g64 and dense matrices in int8.
        tell: takes a line when a layer begins.

    Raises:
        UsageError: another family, routing that llama.cpp does otherwise, or the package `gguf` is not installed.
    """
    try:
        import gguf  # noqa: PLC0415 - an extra that only this measurement needs
    except ImportError:
        raise UsageError("the package gguf is not installed", hint=install_hint("llama-cpp")) from None
    config: dict[str, Any] = json.loads(model.read_file("config.json"))
    name = ARCHITECTURES.get(str(config["model_type"]))
    if name is None:
        raise UsageError(f"no GGUF for {config['model_type']}", hint=f"Known: {', '.join(ARCHITECTURES)}.")
    if bool(config["norm_topk_prob"]) != (name == "qwen3moe"):
        raise UsageError(f"llama.cpp knows {name} with norm_topk_prob {name == 'qwen3moe'} only")
    writer = gguf.GGUFWriter(str(path), name, use_temp_file=False)
    _add_sizes(writer, config)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    _add_vocabulary(writer, gguf, int(config["vocab_size"]), "olmo" if name == "olmoe" else "qwen2")

    for tensor, source in (("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")):
        _add_dense(writer, gguf, model, tensor, source)
    for number, entry in enumerate(model.geometry.layers, 1):
        tell(f"the same weights as GGUF, layer {number} of {len(model.geometry.layers)}")
        for tensor, source in _LAYER.items():
            _add_dense(writer, gguf, model, f"blk.{entry.layer}.{tensor}", f"model.layers.{entry.layer}.{source}")
        for part, blocks in _experts(model, entry.layer, entry.experts).items():
            kind = gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(f"blk.{entry.layer}.ffn_{part}_exps.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_dense(writer: Any, gguf: Any, model: RecordStore, tensor: str, source: str) -> None:
    found = model.read_dense(f"{source}.weight")
    if found.scales is None:
        writer.add_tensor(f"{tensor}.weight", found.data)
    elif source.endswith("mlp.gate"):
        writer.add_tensor(f"{tensor}.weight", found.data * found.scales[:, None])
    else:
        blocks = q8_blocks(found.data, found.scales)
        writer.add_tensor(f"{tensor}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)


def _experts(model: RecordStore, layer: int, experts: int) -> dict[str, NDArray[np.uint8]]:
    """The experts of a layer, uint8 [experts, rows, bytes of a row], by part."""
    layout = model.geometry.layout(layer)
    found: dict[str, list[NDArray[np.uint8]]] = {part: [] for part in _EXPERT_PARTS}
    for expert in range(experts):
        views = layout.views(model.read_record(layer, expert))
        for part, blocks in found.items():
            blocks.append(q4_blocks(views[part], views[f"{part}.scales"], 2 * views[part].shape[1]))
    return {part: np.stack(blocks) for part, blocks in found.items()}


def _add_sizes(writer: Any, config: Mapping[str, Any]) -> None:
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim", int(config["hidden_size"]) // heads))
    wide = int(config.get("moe_intermediate_size", config["intermediate_size"]))
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_feed_forward_length(wide)
    writer.add_expert_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config["num_key_value_heads"]))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_rope_freq_base(float(config["rope_theta"]))
    writer.add_expert_count(int(config["num_experts"]))
    writer.add_expert_used_count(int(config["num_experts_per_tok"]))


def _add_vocabulary(writer: Any, gguf: Any, size: int, pre: str) -> None:
    """Bytes, three control tokens, and unused ones up to `size`; llama.cpp refuses a file without."""
    known = [*byte_tokens(), "th", "he", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    unused = size - len(known)
    if unused < 0:
        raise UsageError(f"a vocabulary of {size} tokens is below {len(known)}")
    kind = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(known + [f"<unused{number}>" for number in range(unused)])
    writer.add_token_types([kind.NORMAL] * 258 + [kind.CONTROL] * 3 + [kind.UNUSED] * unused)
    writer.add_token_merges(["t h", "h e"])
    for add in (writer.add_eos_token_id, writer.add_bos_token_id, writer.add_pad_token_id):
        add(258)
    writer.add_add_bos_token(False)

"""A GGUF of a real geometry with random weights, so that llama.cpp can do the same work.

Experts are Q4_0, other matrices Q8_0, norms float32: about the bytes of this project's int4-g64 and int8. Needs the
package `gguf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tierd.errors import UsageError
from tierd.extras import install_hint

__all__ = ["ARCHITECTURES", "byte_tokens", "write_gguf"]

ARCHITECTURES: Final = {"olmoe": "olmoe", "qwen3_moe": "qwen3moe"}
"""Names of families here and in GGUF."""

_Q4_BYTES, _Q8_BYTES, _BLOCK = 18, 34, 32
_POOL_BYTES: Final = 8 << 20


def byte_tokens() -> list[str]:
    """The 256 characters by which byte-level BPE writes bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    found, stand_ins = [], 0
    for byte in range(256):
        found.append(chr(byte if byte in plain else 256 + stand_ins))
        stand_ins += byte not in plain
    return found


def _blocks(rows: int, cols: int, block_bytes: int, pool: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Quantised rows of random codes, uint8 [rows, bytes]; each block begins with its float16 scale."""
    per_row = cols // _BLOCK
    count = rows * per_row
    flat = np.resize(pool, count * block_bytes).reshape(count, block_bytes)
    levels = 4.6 if block_bytes == _Q4_BYTES else 74
    flat[:, :2] = np.array([cols**-0.5 / levels], np.float16).view(np.uint8)
    return flat.reshape(rows, per_row * block_bytes)


def write_gguf(path: Path, config: Mapping[str, Any]) -> None:
    """Writes the file.

    Args:
        path: of the file; replaced.
        config: config.json of an OLMoE or Qwen3-MoE model.

    Raises:
        UsageError: another family, or the package `gguf` is not installed.
    """
    try:
        import gguf  # noqa: PLC0415 - an extra that only this measurement needs
    except ImportError:
        raise UsageError("the package gguf is not installed", hint=install_hint("llama-cpp")) from None
    name = ARCHITECTURES.get(str(config["model_type"]))
    if name is None:
        raise UsageError(f"no GGUF for {config['model_type']}", hint=f"Known: {', '.join(ARCHITECTURES)}.")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv, width = int(config["num_key_value_heads"]), int(config.get("head_dim", hidden // heads))
    layers, experts = int(config["num_hidden_layers"]), int(config["num_experts"])
    wide = int(config.get("moe_intermediate_size", config["intermediate_size"]))
    vocabulary = int(config["vocab_size"])
    writer = gguf.GGUFWriter(str(path), name, use_temp_file=False)
    _add_sizes(writer, config, kv=kv, width=width, wide=wide)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    _add_vocabulary(writer, gguf, vocabulary, "olmo" if name == "olmoe" else "qwen2")
    pool = np.random.Generator(np.random.Philox(3)).integers(0, 256, _POOL_BYTES + 2, np.uint8)

    def matrix(tensor: str, rows: int, cols: int, *, quant: str = "Q8_0", copies: int = 1) -> None:
        block = _Q4_BYTES if quant == "Q4_0" else _Q8_BYTES
        data = _blocks(rows * copies, cols, block, pool)
        shaped = data.reshape(copies, rows, -1) if copies > 1 else data
        writer.add_tensor(tensor, shaped, raw_dtype=gguf.GGMLQuantizationType[quant])

    def vector(tensor: str, length: int) -> None:
        writer.add_tensor(tensor, np.ones(length, np.float32))

    matrix("token_embd.weight", vocabulary, hidden)
    vector("output_norm.weight", hidden)
    matrix("output.weight", vocabulary, hidden)
    for layer in range(layers):
        p = f"blk.{layer}."
        for norm in ("attn_norm", "ffn_norm"):
            vector(f"{p}{norm}.weight", hidden)
        for projection, rows, cols in (
            ("attn_q", heads * width, hidden),
            ("attn_k", kv * width, hidden),
            ("attn_v", kv * width, hidden),
            ("attn_output", hidden, heads * width),
        ):
            matrix(f"{p}{projection}.weight", rows, cols)
        for norm, count in (("attn_q_norm", heads), ("attn_k_norm", kv)):
            vector(f"{p}{norm}.weight", count * width if name == "olmoe" else width)
        router = np.random.Generator(np.random.Philox(layer)).standard_normal((experts, hidden), np.float32)
        writer.add_tensor(f"{p}ffn_gate_inp.weight", router * np.float32(hidden**-0.5))
        for part, rows, cols in (("gate", wide, hidden), ("up", wide, hidden), ("down", hidden, wide)):
            matrix(f"{p}ffn_{part}_exps.weight", rows, cols, quant="Q4_0", copies=experts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any, config: Mapping[str, Any], *, kv: int, width: int, wide: int) -> None:
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_feed_forward_length(wide)
    writer.add_expert_feed_forward_length(wide)
    writer.add_head_count(int(config["num_attention_heads"]))
    writer.add_head_count_kv(kv)
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

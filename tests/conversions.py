"""What tests of conversion share: a small config, folders to compare, and children that may be killed."""

from __future__ import annotations

import multiprocessing

__all__ = ["CONFIG", "SMALL_SHARDS", "contents", "in_child"]

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "vocab_size": 50,
    "mlp_only_layers": [1],
}
SMALL_SHARDS = 8192


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def in_child(function, *arguments):
    """Runs a function in a forked process; returns its exit code (negative: the signal that ended it)."""
    child = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    child.start()
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode

"""A checkpoint of OLMoE's layer sizes with random weights, and routes that are given instead of chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from tierd.integrations.transformers.interface import experts_modules

__all__ = ["OLMOE_1B_7B", "force_routes", "make_checkpoint"]

OLMOE_1B_7B: Final[dict[str, Any]] = {
    "model_type": "olmoe",
    "architectures": ["OlmoeForCausalLM"],
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "bfloat16",
}
"""config.json of allenai/OLMoE-1B-7B, as far as it decides sizes."""


def make_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """Writes a checkpoint in bf16 under the published names, one file per layer; nothing if it is there already."""
    done = folder / "complete"
    if done.exists() and done.read_text(encoding="ascii") == json.dumps(config):
        return
    folder.mkdir(parents=True, exist_ok=True)
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    layers = config["num_hidden_layers"]
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float32)
        return (drawn * columns**-0.5).to(torch.bfloat16)

    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors = {f"{prefix}.self_attn.{name}_proj.weight": matrix(hidden, hidden) for name in "qkvo"}
        for norm in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        tensors[f"{prefix}.mlp.gate.weight"] = matrix(config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            place = f"{prefix}.mlp.experts.{expert}"
            tensors[f"{place}.gate_proj.weight"] = matrix(width, hidden)
            tensors[f"{place}.up_proj.weight"] = matrix(width, hidden)
            tensors[f"{place}.down_proj.weight"] = matrix(hidden, width)
        save_file(tensors, folder / f"model-{layer + 1:05d}-of-{layers + 1:05d}.safetensors")
    tensors = {
        "model.embed_tokens.weight": matrix(vocab, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": matrix(vocab, hidden),
    }
    save_file(tensors, folder / f"model-{layers + 1:05d}-of-{layers + 1:05d}.safetensors")
    _write_index(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    done.write_text(json.dumps(config), encoding="ascii")


def force_routes(model: nn.Module, routes: np.ndarray) -> None:
    """Makes each router give these experts, each with the same weight, token after token.

    Args:
        model: on the interface, with a router beside each module of experts whose answer is (logits, weights,
            experts).
        routes: int [tokens, layers, k]; after the last token the first follows.
    """
    table = torch.from_numpy(routes.astype(np.int64))
    for place, target in enumerate(experts_modules(model)):
        parent = model.get_submodule(target.path.rpartition(".")[0])
        router = parent.get_submodule("gate")
        router.forward = _Given(router, table[:, place])


class _Given:
    """A router's answer from a table."""

    def __init__(self, router: nn.Module, table: torch.Tensor) -> None:
        self._weight = router.weight
        self._table = table
        self._position = 0

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = hidden.reshape(-1, hidden.shape[-1])
        count, k = len(rows), self._table.shape[1]
        logits = nn.functional.linear(rows, self._weight)
        places = (self._position + torch.arange(count)) % len(self._table)
        self._position += count
        return logits, torch.full((count, k), 1 / k, dtype=rows.dtype), self._table[places]


def _write_index(folder: Path) -> None:
    names: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            table = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        names |= {name: path.name for name in table if name != "__metadata__"}
    content = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content), encoding="utf-8")

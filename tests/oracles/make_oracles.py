"""Make the oracle folders: tiny checkpoints together with the outputs that transformers computes from them.

    python tests/oracles/make_oracles.py --out DIR [--only NAME,NAME] [--seed N]

needs the extra `oracle` (torch, transformers). Every DIR/NAME holds `config.json`, the weights as
`save_pretrained` writes them, and `ref.npz`:

    input_ids            [1, T] int64    the prompt
    logits               [1, T, V] f32   of the prompt, without a cache
    greedy               [16] int64      tokens of cached greedy decoding after the prompt
    greedy_logits        [16, V] f32     the logits that each of them was chosen from
    route_idx_{layer}    [T, K] int32    experts of each prompt token, ascending
    route_w_{layer}      [T, K] f32      their weights, in the same order

All arithmetic is float32, also where the weights are stored as bfloat16 or float16: those are rounded first.
A weight depends on the seed, the draw and its tensor's name alone (a Philox stream keyed by SHA-256), so two
runs write the same bytes. A draw whose tokens or experts hinge on rounding (judged by a float64 run and the
gaps below) is thrown away, and the next one is taken.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY, PROMPT, GENERATED = 128, 24, 16
MAX_DRAWS = 30
MIN_TOKEN_GAP = 5e-3  # between the best and the second logit of every greedy step
MIN_ROUTE_GAP = 1e-4  # between the probabilities of the last expert chosen and the first left out

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
OLMOE = {
    "num_key_value_heads": 4,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "norm_topk_prob": False,
}
MIXTRAL = {
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
}
QWEN3_MOE = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_experts": 10,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


@dataclass(frozen=True)
class Oracle:
    """One folder: the model class, its configuration, how the weights are stored, and in how many shards."""

    family: str
    settings: dict[str, Any]
    dtype: torch.dtype = torch.float32
    shards: int = 1


ORACLES = {
    "olmoe": Oracle("Olmoe", OLMOE),
    "olmoe_clip": Oracle("Olmoe", OLMOE | {"clip_qkv": 1.0, "num_experts": 8, "norm_topk_prob": True}),
    "mixtral": Oracle("Mixtral", MIXTRAL),
    "mixtral_sliding": Oracle("Mixtral", MIXTRAL | {"sliding_window": 8, "num_hidden_layers": 2}),
    "mixtral_f16": Oracle("Mixtral", MIXTRAL | {"num_experts_per_tok": 3}, torch.float16),
    "qwen3_moe": Oracle("Qwen3Moe", QWEN3_MOE),
    "qwen3_moe_tied": Oracle(
        "Qwen3Moe",
        QWEN3_MOE | {"tie_word_embeddings": True, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "qwen3_moe_bf16": Oracle("Qwen3Moe", QWEN3_MOE | {"mlp_only_layers": []}, torch.bfloat16),
    "qwen3_moe_shards": Oracle(
        "Qwen3Moe",
        QWEN3_MOE | {"num_hidden_layers": 4, "num_experts": 8, "mlp_only_layers": [], "decoder_sparse_step": 2},
        shards=2,
    ),
}


@dataclass
class Run:
    """What one forward pass over the prompt gave; routes by layer, experts ascending."""

    logits: np.ndarray
    experts: dict[int, np.ndarray] = field(default_factory=dict)
    weights: dict[int, np.ndarray] = field(default_factory=dict)
    route_gap: float = float("inf")


def stream(seed: str, name: str) -> np.random.Generator:
    """The random stream of one tensor, independent of all others."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def fill(model: torch.nn.Module, seed: str, stored_as: torch.dtype, *, tied: bool) -> None:
    """Give every parameter its value: matrices keep the variance, routers are sharper, norms are near one."""
    for name, tensor in model.named_parameters():
        values = stream(seed, name).standard_normal(tuple(tensor.shape))
        if "norm" in name:
            values = 1.0 + 0.1 * values
        elif "embed_tokens" not in name or tied:
            values *= (2.0 if name.endswith("gate.weight") else 1.0) / np.sqrt(tensor.shape[-1])
        rounded = torch.from_numpy(values.astype(np.float32)).to(stored_as)
        with torch.no_grad():
            tensor.copy_(rounded)


@contextmanager
def routes_into(model: torch.nn.Module, run: Run) -> Iterator[None]:
    """Record what the routers choose during a forward pass over the prompt."""

    def record(layer: int, router_logits: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> None:
        order = experts.argsort(-1)
        run.experts[layer] = experts.gather(-1, order).numpy().astype(np.int32)
        run.weights[layer] = weights.gather(-1, order).float().numpy()
        ranked = router_logits.double().softmax(-1).sort(-1, descending=True).values
        chosen = experts.shape[-1]
        run.route_gap = min(run.route_gap, float((ranked[:, chosen - 1] - ranked[:, chosen]).min()))

    hooks = []
    for name, module in model.named_modules():
        if type(module).__name__.endswith("TopKRouter"):
            layer = int(name.split(".layers.")[1].split(".")[0])
            hooks.append(module.register_forward_hook(lambda _m, _i, out, at=layer: record(at, *out)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def forward(model: torch.nn.Module, ids: torch.Tensor) -> Run:
    """Run all of `ids` [1, T] at once, without a cache."""
    run = Run(np.empty(0))
    with torch.no_grad(), routes_into(model, run):
        run.logits = model(input_ids=ids, use_cache=False).logits.numpy()
    return run


def decode(model: torch.nn.Module, ids: torch.Tensor) -> tuple[list[int], np.ndarray]:
    """Decode greedily with the KV cache, token by token; the tokens, and the logits behind each [16, V]."""
    tokens: list[int] = []
    rows: list[np.ndarray] = []
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True)
        while True:
            rows.append(out.logits[0, -1].numpy())
            tokens.append(int(rows[-1].argmax()))
            if len(tokens) == GENERATED:
                return tokens, np.stack(rows)
            step = torch.tensor([[tokens[-1]]])
            out = model(input_ids=step, cache=out.cache, use_cache=True)


def firm(model: torch.nn.Module, ids: torch.Tensor, run: Run, tokens: list[int]) -> str:
    """The margins of a draw, for the report; empty where a token or a route hinges on rounding."""
    full = torch.cat([ids, torch.tensor([tokens])], 1)
    double = forward(copy.deepcopy(model).double(), full)
    ranked = np.sort(double.logits[0, PROMPT - 1 : -1], -1)
    token_gap = float((ranked[:, -1] - ranked[:, -2]).min())
    if double.logits[0, PROMPT - 1 : -1].argmax(-1).tolist() != tokens or token_gap < MIN_TOKEN_GAP:
        return ""
    same = all(np.array_equal(double.experts[layer][:PROMPT], run.experts[layer]) for layer in run.experts)
    if not same or double.route_gap < MIN_ROUTE_GAP:
        return ""
    far = float(np.abs(double.logits[0, :PROMPT] - run.logits[0]).max())
    return f"token gap {token_gap:.3f}, route gap {double.route_gap:.1e}, float64 differs by {far:.1e}"


def make(name: str, oracle: Oracle, out: Path, seed: int) -> None:
    """Write the folder `out`/`name`, and read the checkpoint back to see that it gives the same logits."""
    config = getattr(transformers, f"{oracle.family}Config")(**(COMMON | oracle.settings))
    config._attn_implementation = config._experts_implementation = "eager"
    model_class = getattr(transformers, f"{oracle.family}ForCausalLM")
    model = model_class(config).eval().to(torch.float32)
    for draw in range(MAX_DRAWS):
        fill(model, f"{seed}.{draw}", oracle.dtype, tied=config.tie_word_embeddings)
        ids = torch.from_numpy(stream(f"{seed}.{draw}", "prompt").integers(0, VOCABULARY, (1, PROMPT)))
        run = forward(model, ids)
        tokens, rows = decode(model, ids)
        if margins := firm(model, ids, run, tokens):
            break
    else:
        sys.exit(f"{name}: tokens or routes hinge on rounding in {MAX_DRAWS} draws; choose another --seed")

    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    size = sum(p.numel() for p in model.parameters()) * oracle.dtype.itemsize
    model.to(oracle.dtype).save_pretrained(folder, max_shard_size=size * 2 // (oracle.shards * 2 - 1))
    arrays = {"input_ids": ids.numpy(), "logits": run.logits, "greedy": np.array(tokens)}
    arrays["greedy_logits"] = rows
    for layer in run.experts:
        arrays |= {f"route_idx_{layer}": run.experts[layer], f"route_w_{layer}": run.weights[layer]}
    np.savez_compressed(folder / "ref.npz", **arrays)

    again = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    drift = float(np.abs(forward(again, ids).logits - run.logits).max())
    if drift > 1e-5:
        sys.exit(f"{name}: the checkpoint read back from {folder} gives other logits (by {drift:.1e})")
    kilobytes = sum(file.stat().st_size for file in folder.iterdir()) / 1000
    print(f"{name:17} draw {draw}, {kilobytes:4.0f} kB, logits std {run.logits.std():.2f}, {margins}")


def main() -> None:
    """Make the folders that the command line names."""
    parser = argparse.ArgumentParser(description="Make tiny checkpoints with reference outputs.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the oracle folders into")
    parser.add_argument("--only", default=",".join(ORACLES), help="names, separated by commas (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other weights and prompts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in arguments.only.split(","):
        if name not in ORACLES:
            parser.error(f"no oracle is called {name!r}; there are {', '.join(ORACLES)}")
        make(name, ORACLES[name], arguments.out, arguments.seed)


if __name__ == "__main__":
    main()

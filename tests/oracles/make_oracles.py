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
import json
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
MAX_ROUNDING = 1e-4  # of a logit: more means that an indexer's choice of positions hinges on rounding

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


@dataclass(frozen=True)
class Oracle:
    """One folder: the model class, its configuration, how the weights are stored, and in how many shards.

    `config` names the configuration's class where it is not the family's; `vision` makes a composite of it;
    `model_type` is what the release calls itself, where transformers knows it under another family's name.
    """

    family: str
    settings: dict[str, Any]
    dtype: torch.dtype = torch.float32
    shards: int = 1
    config: str = ""
    vision: dict[str, Any] | None = None
    model_type: str = ""

    def build(self) -> torch.nn.Module:
        """The model with its configuration, before it has weights."""
        settings = COMMON | self.settings
        if self.vision is not None:
            special = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
            ids = {name: VOCABULARY - 1 - place for place, name in enumerate(special)}
            settings = {"text_config": settings, "vision_config": self.vision, "tie_word_embeddings": False} | ids
        config = getattr(transformers, self.config or f"{self.family}Config")(**settings)
        config._attn_implementation = config._experts_implementation = "eager"
        kind = "ForCausalLM" if self.vision is None else "ForConditionalGeneration"
        return getattr(transformers, self.family + kind)(config).eval().to(torch.float32)


ORACLES = {
    name: Oracle(**(facts | {"dtype": getattr(torch, facts.get("dtype", "float32"))}))
    for name, facts in json.loads((Path(__file__).parent / "tiny_models.json").read_text()).items()
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


def centred_norms(model: torch.nn.Module) -> set[str]:
    """Names of the norms that store their weight less one: they are made as zeros."""
    return {name for name, tensor in model.named_parameters() if "norm" in name and not tensor.any()}


def fill(model: torch.nn.Module, seed: str, stored_as: torch.dtype, *, tied: bool, centred: set[str]) -> None:
    """Give every parameter its value: matrices keep the variance, routers are sharper, norms are near one."""
    corrections = [(name, tensor) for name, tensor in model.named_buffers() if name.endswith("correction_bias")]
    for name, tensor in [*model.named_parameters(), *corrections]:
        values = stream(seed, name).standard_normal(tuple(tensor.shape))
        if name.endswith(("correction_bias", "norm.bias")):
            values *= 0.05
        elif "norm" in name:
            values = (0.0 if name in centred else 1.0) + 0.1 * values
        elif name.endswith("dt_bias"):
            values -= 3.0  # states that remember some twenty tokens
        elif "embed_tokens" not in name or tied:
            values *= (2.0 if name.endswith(("gate.weight", "router.weight")) else 1.0) / np.sqrt(tensor.shape[-1])
        rounded = torch.from_numpy(values.astype(np.float32)).to(stored_as)
        with torch.no_grad():
            tensor.copy_(rounded)


def route_margin(logits: torch.Tensor, correction: torch.Tensor | None, chosen: int, groups: int, kept: int) -> float:
    """How far the choice of experts is from another one, in the scores that it goes by; logits [T, E]."""
    if chosen == logits.shape[-1]:
        return float("inf")
    logits = logits.double()
    scores = logits.softmax(-1) if correction is None else logits.sigmoid() + correction
    margin = float("inf")
    if correction is not None and kept < groups:
        parts = scores.reshape(len(scores), groups, -1)
        sums = parts.topk(2, -1).values.sum(-1)
        ranked = sums.sort(-1, descending=True).values
        margin = float((ranked[:, kept - 1] - ranked[:, kept]).min())
        out = sums < ranked[:, kept - 1 : kept]
        scores = parts.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(1)
    ranked = scores.sort(-1, descending=True).values
    return min(margin, float((ranked[:, chosen - 1] - ranked[:, chosen]).min()))


@contextmanager
def routes_into(model: torch.nn.Module, run: Run) -> Iterator[None]:
    """Record what the routers choose during a forward pass over the prompt."""
    groups, kept = getattr(model.config, "n_group", 1), getattr(model.config, "topk_group", 1)

    def record(
        layer: int, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], out: tuple[torch.Tensor, ...]
    ) -> None:
        router_logits, weights, experts = out
        order = experts.argsort(-1)
        run.experts[layer] = experts.gather(-1, order).numpy().astype(np.int32)
        run.weights[layer] = weights.gather(-1, order).float().numpy()
        correction = getattr(module, "e_score_correction_bias", inputs[1] if len(inputs) > 1 else None)
        margin = route_margin(router_logits, correction, experts.shape[-1], groups, kept)
        run.route_gap = min(run.route_gap, margin)

    hooks = []
    for name, module in model.named_modules():
        if type(module).__name__.endswith(("TopKRouter", "TopkRouter")):
            layer = int(name.split(".layers.")[1].split(".")[0])
            hooks.append(module.register_forward_hook(lambda m, i, out, at=layer: record(at, m, i, out)))
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
    if far > MAX_ROUNDING:
        return ""
    return f"token gap {token_gap:.3f}, route gap {double.route_gap:.1e}, float64 differs by {far:.1e}"


def make(name: str, oracle: Oracle, out: Path, seed: int) -> None:
    """Write the folder `out`/`name`, and read the checkpoint back to see that it gives the same logits."""
    model = oracle.build()
    centred = centred_norms(model)
    for draw in range(MAX_DRAWS):
        fill(model, f"{seed}.{draw}", oracle.dtype, tied=model.config.tie_word_embeddings, centred=centred)
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

    again = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    drift = float(np.abs(forward(again, ids).logits - run.logits).max())
    if drift > 1e-5:
        sys.exit(f"{name}: the checkpoint read back from {folder} gives other logits (by {drift:.1e})")
    if oracle.model_type:
        written = json.loads((folder / "config.json").read_text()) | {"model_type": oracle.model_type}
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
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

"""Make `embedded.npz`: what transformers computes from the embedded model, in float32 on the stored bfloat16.

    python tests/oracles/make_embedded_oracle.py [--out FILE]

needs the extra `oracle`. The keys are listed in README.md. Refused where the greedy tokens hinge on rounding.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "compute_node" / "embedded"
TEXTS = (
    "It was a fine morning, and",
    "And the LORD said unto Moses,",
    "hacker n. A person who",
)
GENERATED = 64
MIN_TOKEN_GAP = 2e-3  # some two hundred times the distance between float32 implementations


def decode(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], np.ndarray]:
    """Decode greedily with the KV cache; the tokens, and the logits behind each [64, V]."""
    tokens: list[int] = []
    rows: list[np.ndarray] = []
    with torch.no_grad():
        out = model(input_ids=torch.tensor([ids]), use_cache=True)
        while True:
            rows.append(out.logits[0, -1].numpy())
            tokens.append(int(rows[-1].argmax()))
            if len(tokens) == GENERATED:
                return tokens, np.stack(rows)
            out = model(input_ids=torch.tensor([tokens[-1:]]), cache=out.cache, use_cache=True)


def main() -> None:
    """Run the three prompts and write the file."""
    parser = argparse.ArgumentParser(description="Make the reference outputs of the embedded model.")
    parser.add_argument("--out", type=Path, default=HERE / "embedded.npz", help="file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    arrays: dict[str, np.ndarray] = {"texts": np.array(TEXTS)}
    logits, greedy, gaps = [], [], []
    for number, text in enumerate(TEXTS):
        ids = tokenizer(text)["input_ids"]
        tokens, rows = decode(model, ids)
        ranked = np.sort(rows, -1)
        gap = float((ranked[:, -1] - ranked[:, -2]).min())
        print(f"{text!r}, gap {gap:.4f}: {tokenizer.decode(tokens)!r}")
        if gap < MIN_TOKEN_GAP:
            sys.exit(f"the greedy tokens after {text!r} hinge on rounding; choose another prompt")
        arrays[f"prompt_{number}"] = np.array(ids)
        logits.append(rows[0])
        greedy.append(tokens)
        gaps.append(gap)
    arrays |= {"logits": np.stack(logits), "greedy": np.array(greedy), "top2_gap": np.array(gaps, np.float32)}
    np.savez_compressed(arguments.out, **arrays)


if __name__ == "__main__":
    main()

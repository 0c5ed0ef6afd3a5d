"""Make the oracle folders whose checkpoints are published in codes: fp8, mxfp4 and packed int4.

    python tests/oracles/make_coded_oracles.py --out DIR [--only NAME,NAME] [--seed N]

needs the extra `oracle`. A model gets weights as in make_oracles.py, is saved as float32 and quantised by
quantise_folder.py; transformers loads the values that the codes stand for, as float32, and what it computes becomes
`ref.npz`. The folder holds the codes. Draws that hinge on rounding are thrown away as there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import make_oracles
import numpy as np
import torch
import transformers
from quantise_folder import quantise_folder

__all__ = ["CODED"]


@dataclass(frozen=True)
class Coded:
    """One folder: whose settings, what is changed in them, and in what codes it is published."""

    base: str
    settings: dict[str, Any]
    coding: str
    scales: str = "f32"
    model_type: str = ""


_WIDE = {
    "hidden_size": 136, "intermediate_size": 136, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "n_routed_experts": 6, "n_group": 2, "topk_group": 1,
}  # fmt: skip
CODED = {
    "deepseek_v3_fp8": Coded("deepseek_v3", _WIDE, "fp8"),
    "deepseek_v3_fp8_ue8m0": Coded("deepseek_v3", _WIDE, "fp8", "ue8m0"),
    "gpt_oss_mxfp4": Coded("gpt_oss", {"hidden_size": 64, "intermediate_size": 32}, "mxfp4"),
    "kimi_k2_int4": Coded(
        "kimi_k2",
        {"hidden_size": 96, "moe_intermediate_size": 40, "num_hidden_layers": 2},
        "int4",
        model_type="kimi_k2",
    ),
}


def make(name: str, coded: Coded, out: Path, seed: int) -> None:
    """Write the folder `out`/`name`."""
    base = make_oracles.ORACLES[coded.base]
    model = make_oracles.Oracle(base.family, base.settings | coded.settings).build()
    centred = make_oracles.centred_norms(model)
    folder = out / name
    with tempfile.TemporaryDirectory() as scratch:
        plain, codes, values = (Path(scratch) / part for part in ("plain", "codes", "values"))
        for draw in range(make_oracles.MAX_DRAWS):
            key = f"{name}.{seed}.{draw}"
            make_oracles.fill(model, key, torch.float32, tied=False, centred=centred)
            model.save_pretrained(plain)
            quantise_folder(plain, codes, values, coding=coded.coding, scales=coded.scales)
            read = type(model).from_pretrained(values, dtype=torch.float32, attn_implementation="eager").eval()
            read.config._experts_implementation = "eager"
            ids = torch.from_numpy(
                make_oracles.stream(key, "prompt").integers(0, make_oracles.VOCABULARY, (1, make_oracles.PROMPT))
            )
            run = make_oracles.forward(read, ids)
            tokens, rows = make_oracles.decode(read, ids)
            if margins := make_oracles.firm(read, ids, run, tokens):
                break
        else:
            sys.exit(f"{name}: tokens or routes hinge on rounding in every draw; choose another --seed")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(codes, folder)
    if coded.model_type:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": coded.model_type}, indent=2) + "\n")
    arrays = {"input_ids": ids.numpy(), "logits": run.logits, "greedy": np.array(tokens), "greedy_logits": rows}
    for layer in run.experts:
        arrays |= {f"route_idx_{layer}": run.experts[layer], f"route_w_{layer}": run.weights[layer]}
    np.savez_compressed(folder / "ref.npz", **arrays)
    kilobytes = sum(file.stat().st_size for file in folder.iterdir()) / 1000
    print(f"{name:22} draw {draw}, {kilobytes:4.0f} kB, logits std {run.logits.std():.2f}, {margins}")


def main() -> None:
    """Make the folders that the command line names."""
    parser = argparse.ArgumentParser(description="Make tiny checkpoints in codes with reference outputs.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the oracle folders into")
    parser.add_argument("--only", default=",".join(CODED), help="names, separated by commas (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other weights and prompts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in arguments.only.split(","):
        if name not in CODED:
            parser.error(f"no oracle is called {name!r}; there are {', '.join(CODED)}")
        make(name, CODED[name], arguments.out, arguments.seed)


if __name__ == "__main__":
    main()

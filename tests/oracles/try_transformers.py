"""Tries every MoE architecture of the installed transformers with a tiny config, and writes the table of what passes.

    python tests/oracles/try_transformers.py --out tierd/integrations/transformers/ARCHITECTURES.md

An architecture is one whose modeling file defines stacked or single routed experts and a class that generates text. A
tiny model of random weights is saved, and `check` compares the unmodified model with the one on tierd's experts.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pkgutil
import re
import signal
import tempfile
import time
from pathlib import Path

import torch
import transformers

from tierd.errors import TierdError
from tierd.integrations.transformers.architecture import quiet
from tierd.integrations.transformers.check import check

VOCABULARY = 384
SECONDS = 120
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16, "moe_num_experts": 16, "num_experts_per_tok": 4,
    "moe_k": 4, "moe_topk": 4, "num_experts_per_token": 4, "moe_top_k": 4, "top_k_experts": 4, "n_shared_experts": 1,
    "num_shared_experts": 1, "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "max_position_embeddings": 512, "sliding_window": 8, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4, "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_d_state": 8, "ssm_state_size": 8,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "n_groups": 1, "mamba_dt_rank": 8, "chunk_size": 8,
    "num_mtp_layers": 0, "num_nextn_predict_layers": 0, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "tie_word_embeddings": False, "attention_dropout": 0.0,
}  # fmt: skip
OWN: dict[str, dict] = json.loads((Path(__file__).with_name("tiny_configs.json")).read_text(encoding="utf-8"))
"""By model_type: what the common sizes do not cover; `None` takes a common size away."""


KEPT = ("embed_scale", "A_log", "dt_bias")
"""Parameters that are left as the model's own code makes them."""


def modeling_modules():
    """(directory, module) of every modeling file with routed experts and a router."""
    for entry in pkgutil.iter_modules(transformers.models.__path__):
        path = Path(transformers.models.__path__[0]) / entry.name / f"modeling_{entry.name}.py"
        if not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        if re.search(r"^class \w*(Experts|SparseMoe|MoE|Moe\b|MoeBlock|SparseMLP)\w*\(", text, re.MULTILINE):
            yield entry.name, path, text


def classes_of(directory):
    """Classes of a modeling file that generate text, text-only ones first."""
    module = importlib.import_module(f"transformers.models.{directory}.modeling_{directory}")
    found = [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and re.search(r"For(CausalLM|ConditionalGeneration)$", name)
        and "PreTrainedModel" not in name  # what other classes inherit from
        and getattr(value, "config_class", None) is not None
    ]
    return sorted(found, key=lambda each: not each.__name__.endswith("ForCausalLM"))


def small_config(config_class):
    """A config of few and narrow layers, parts of composites included."""
    accepted = fields_of(config_class)
    own = OWN.get(config_class.model_type, {})
    settings = {name: value for name, value in SMALL.items() if name in accepted}
    if "kv_lora_rank" in accepted:  # latent attention: each head has keys of its own
        settings["num_key_value_heads"] = SMALL["num_attention_heads"]
    settings |= {name: value for name, value in own.items() if value != "default"}
    for name in [name for name, value in own.items() if value == "default"]:
        settings.pop(name, None)
    for part, part_class in (getattr(config_class, "sub_configs", None) or {}).items():
        if part not in own and part_class is not None and hasattr(part_class, "model_type"):
            settings[part] = small_config(part_class).to_dict()
    return config_class(**settings)


def fields_of(config_class):
    names = set(inspect.signature(config_class.__init__).parameters)
    for base in config_class.__mro__:
        names |= set(vars(base).get("__annotations__", {}))
    return names


def fill(model):
    """Random weights that keep activations of the order of one, so that routes and tokens vary."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in sorted([*model.named_parameters(), *model.named_buffers()]):
            if not value.is_floating_point() or "inv_freq" in name or name.endswith(KEPT):
                continue
            drawn = torch.randn(value.shape, generator=generator)
            if value.ndim <= 1:
                around = 1.0 if "norm" in name and bool((value != 0).any()) else 0.0
                value.copy_(around + 0.1 * drawn)
            elif "embed_tokens" in name:
                value.copy_(drawn)
            else:
                value.copy_(drawn * value.shape[-1] ** -0.5)


def attempt(cls):
    """One line of the table for a class: (passed, largest error, reason)."""
    try:
        with quiet():
            config = small_config(cls.config_class)
            config.architectures = [cls.__name__]
            torch.manual_seed(0)
            model = cls(config).eval().to(torch.float32)
            fill(model)
    except Exception as error:  # noqa: BLE001  whatever it is, it goes into the table
        return None, None, f"no tiny model: {type(error).__name__}: {first_line(error)}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with quiet():
                model.save_pretrained(folder)
            result = check(Path(folder))
        except Exception as error:  # noqa: BLE001
            return None, None, f"{type(error).__name__}: {first_line(error)}"
    if not result.supported:
        return False, None, result.reason
    return result.passed, result.max_logit_error, result.reason


def first_line(error):
    text = error.message if isinstance(error, TierdError) else str(error)
    return (text.splitlines() or [""])[0].replace("|", "/")[:160]


class Late(Exception):
    """No result in time; no OSError, which would be taken for one of a drive."""


def expire(*_):
    raise Late(f"no result within {SECONDS} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the table")
    parser.add_argument("--results", type=Path, help="what earlier runs found: classes that passed are not tried again")
    parser.add_argument("--only", default="", help="directories of transformers.models, with commas")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    signal.signal(signal.SIGALRM, expire)
    only = set(filter(None, arguments.only.split(",")))
    found = {}
    if arguments.results and arguments.results.exists():
        found = json.loads(arguments.results.read_text(encoding="utf-8"))
    classes = [
        cls for directory, _, _ in modeling_modules() if not only or directory in only for cls in classes_of(directory)
    ]
    for cls in sorted(classes, key=lambda each: (not each.__name__.endswith("ForCausalLM"), each.__name__)):
        if found.get(cls.__name__, {}).get("passed"):
            continue
        begun = time.monotonic()
        signal.alarm(SECONDS)
        try:
            passed, error, reason = attempt(cls)
        except Late as late:
            passed, error, reason = None, None, str(late)
        finally:
            signal.alarm(0)
        print(f"{cls.__name__:45s} {passed} {error} {reason} {time.monotonic() - begun:.1f} s", flush=True)
        found[cls.__name__] = {
            "model_type": cls.config_class.model_type, "passed": passed, "error": error, "reason": reason
        }  # fmt: skip
        if arguments.results:
            arguments.results.write_text(json.dumps(found, indent=1), encoding="utf-8")
    arguments.out.write_text(table(found), encoding="utf-8")


def table(found):
    served = [name for name, row in found.items() if row["passed"]]
    lines = [
        "# Architectures of transformers that run on tierd's experts",
        "",
        f"Made by `tests/oracles/try_transformers.py` with transformers {transformers.__version__} and torch",
        f"{torch.__version__}: a tiny model of each class, float32, a quarter of its experts in RAM, through a daemon.",
        "It passes if its 16 greedy tokens are those of the unmodified model; the error is the largest difference of",
        "a logit.",
        "",
        f"{len(served)} of {len(found)} classes pass.",
        "",
        "| class | model_type | passes | largest error | reason |",
        "|---|---|---|---|---|",
    ]
    for name, row in sorted(found.items(), key=lambda item: (not item[1]["passed"], item[0])):
        mark, error = "yes" if row["passed"] else "no", row["error"]
        shown = "" if error is None else f"{error:.0e}"
        lines.append(f"| {name} | {row['model_type']} | {mark} | {shown} | {row['reason']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

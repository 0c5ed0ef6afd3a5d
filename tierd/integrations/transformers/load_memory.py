"""How much memory `load` takes at its peak, in a process of its own: `python -m` this module STORE ARENA.

The store has the sizes of OLMoE-1B-7B; its experts are holes in a file, its dense weights are real.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np

from tierd.integrations.transformers.bench_model import OLMOE_1B_7B
from tierd.store.manifest import MANIFEST_FILE
from tierd.store.store import ExpertStore
from tierd.store.synthetic import make_store

__all__ = ["CONSTANT_BYTES", "measure_load"]

CONSTANT_BYTES: Final = 256 << 20
"""What loading may take beside dense weights and arena: buffers of tensors on their way, and the client."""

_ARENA: Final = 1 << 30
_SECONDS: Final = 300


def measure_load(folder: Path) -> dict[str, Any]:
    """Makes the store if it is not there, loads it in a child process, and says what that took at its peak.

    Returns:
        Bytes by name; `within`: the peak is at most dense weights + what of the arena was touched + the constant.
    """
    path = folder / "olmoe-1b-7b-holes"
    if not (path / MANIFEST_FILE).exists():
        _make(path)
    store = ExpertStore.open(path)
    command = [sys.executable, "-m", __name__, str(path), str(_ARENA)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    dense = store.manifest.dense_bytes
    return found | {
        "dense_bytes": dense,
        "expert_bytes": store.geometry.expert_bytes,
        "arena_bytes": _ARENA,
        "constant_bytes": CONSTANT_BYTES,
        "within": found["peak_bytes"] <= dense + _ARENA + CONSTANT_BYTES,
    }


def _make(path: Path) -> None:
    config = OLMOE_1B_7B
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    generator = np.random.Generator(np.random.Philox(0))

    def matrix(rows: int, columns: int) -> np.ndarray:
        drawn = generator.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5)
        return (drawn.view(np.uint32) >> np.uint32(16)).astype(np.uint16)

    dense: dict[str, np.ndarray] = {}
    for name in ("model.embed_tokens", "lm_head"):
        dense[f"{name}.weight"] = matrix(config["vocab_size"], hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for part in "qkvo":
            dense[f"{prefix}.self_attn.{part}_proj.weight"] = matrix(hidden, hidden)
        for norm in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"):
            dense[f"{prefix}.{norm}.weight"] = np.full(hidden, 0x3F80, np.uint16)
        dense[f"{prefix}.mlp.gate.weight"] = matrix(config["num_experts"], hidden)
    dense["model.norm.weight"] = np.full(hidden, 0x3F80, np.uint16)
    make_store(
        path,
        layers=layers,
        experts=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        hidden=hidden,
        intermediate=config["intermediate_size"],
        format="bf16",
        fill="sparse",
        dense=dense,
        config=config,
    )


def _peak() -> int:
    """Bytes of resident memory that this process has had at most (VmHWM of proc(5))."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def main() -> None:
    """In the child: load, answer one token, say what that took."""
    import torch  # noqa: PLC0415  the parent does without

    from tierd.integrations.transformers.loading import load  # noqa: PLC0415

    before = _peak()
    model = load(sys.argv[1], dtype=torch.bfloat16, arena=sys.argv[2], name="bench")
    loaded = _peak()
    with torch.inference_mode():
        model(input_ids=torch.tensor([[1]]))
    print(json.dumps({"peak_bytes": loaded - before, "with_a_token_bytes": _peak() - before}))
    model.tierd.close()


if __name__ == "__main__":
    main()

"""Tiny models of transformers with random weights, by the table `oracles/tiny_transformers.json`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

__all__ = ["MODELS", "tiny_model"]

MODELS = json.loads((Path(__file__).parent / "oracles" / "tiny_transformers.json").read_text(encoding="utf-8"))


def tiny_model(name):
    """A model of an architecture of the table; always the same weights, each matrix scaled by its width."""
    facts = MODELS[name]
    prefix = facts["prefix"]
    config = getattr(transformers, facts.get("config_class", f"{prefix}Config"))(**facts["config"])
    torch.manual_seed(0)
    model = getattr(transformers, prefix + facts.get("kind", "ForCausalLM"))(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, value in sorted(model.named_parameters()):
            if value.ndim >= 2:
                value.copy_(torch.randn(value.shape, generator=generator) * value.shape[-1] ** -0.5)
        for key, value in model.named_buffers():
            if key.endswith("tid2eid"):
                drawn = [torch.randperm(16, generator=generator)[: value.shape[1]] for _ in range(value.shape[0])]
                value.copy_(torch.stack(drawn))
    return model

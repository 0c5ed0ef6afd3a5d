"""Is a checkpoint, served by a daemon with few experts in RAM, the model that transformers computes by itself?"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tierd.array_files import read_arrays
from tierd.checkpoint.convert import Conversion
from tierd.errors import TierdError, UsageError
from tierd.integrations.transformers.architecture import config_of, model_class, quiet, text_config
from tierd.integrations.transformers.conversion import plan_by_transformers
from tierd.integrations.transformers.loading import load

__all__ = ["GREEDY_TOKENS", "CheckResult", "check", "compare"]

GREEDY_TOKENS: Final = 16
_PROMPT_TOKENS: Final = 24
_MOST_TOKEN_ID: Final = 300
_MOST_BYTES: Final = 1 << 30
"""Prompts are of low token ids: high ones stand for images and the like in some vocabularies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What a check found.

    Attributes:
        architecture: name of the model's class, or what config.json says of it.
        supported: it could be converted and loaded.
        reason: why not, or what differed; empty if all is well.
        greedy_match: the greedy tokens are those of the unmodified model.
        greedy_equal: how many of them.
        max_logit_error: largest difference to the unmodified model's logits; None if there are none to compare.
        logit_scale: standard deviation of the unmodified model's logits.
        unique_experts: that routers chose.
        misses: of these, read from the drive.
    """

    architecture: str
    supported: bool
    reason: str = ""
    greedy_match: bool = False
    greedy_equal: int = 0
    max_logit_error: float | None = None
    logit_scale: float | None = None
    unique_experts: int = 0
    misses: int = 0

    @property
    def passed(self) -> bool:
        """Supported, and the same tokens."""
        return self.supported and self.greedy_match

    def as_object(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def check(folder: Path, *, arena: str = "25%") -> CheckResult:
    """Converts a tiny checkpoint, runs it through a private daemon, and compares with the unmodified model.

    Everything is float32, so that differences are those of the order of sums. Both models are in memory at once.

    Args:
        folder: with config.json and safetensors files, and ref.npz (make_oracles.py) for its prompt, if it is there.
        arena: RAM for experts: an amount or a share.
    """
    architecture = _architecture(folder)
    with tempfile.TemporaryDirectory(prefix="tierd-check-") as scratch:
        store = Path(scratch) / "store"
        try:
            Conversion.prepare(folder, store, experts="f32", dense="f32", planner=plan_by_transformers).run()
            tiered = load(store, dtype=torch.float32, arena=arena, attn_implementation="eager", name="check")
        except TierdError as error:
            return CheckResult(architecture=architecture, supported=False, reason=error.message)
        try:
            return compare(_unmodified(folder), tiered, prompt(folder, tiered))
        finally:
            tiered.tierd.close()


def compare(unmodified: Any, tiered: Any, ids: torch.Tensor) -> CheckResult:
    """Logits of the prompt `ids`, int64 [1, tokens], and greedy tokens behind it, of the two models."""
    with torch.no_grad(), quiet():
        expected = unmodified(input_ids=ids, use_cache=False).logits.float()
        found = tiered(input_ids=ids, use_cache=False).logits.float()
        wanted, given = (_greedy(model, ids) for model in (unmodified, tiered))
    equal = sum(a == b for a, b in zip(wanted, given, strict=False))
    match = wanted == given
    runtime = tiered.tierd.runtime
    return CheckResult(
        architecture=type(tiered).__name__,
        supported=True,
        reason="" if match else f"{equal} of {len(wanted)} greedy tokens are equal",
        greedy_match=match,
        greedy_equal=equal,
        max_logit_error=float((found - expected).abs().max()),
        logit_scale=float(expected.std()),
        unique_experts=runtime.experts_chosen,
        misses=tiered.tierd.stats.outcomes["miss"],
    )


def prompt(folder: Path, model: Any) -> torch.Tensor:
    """The prompt of the folder's reference outputs, else one drawn from low token ids: int64 [1, tokens]."""
    reference = folder / "ref.npz"
    if reference.exists():
        try:
            ids = read_arrays(reference, limit=_MOST_BYTES, only={"input_ids"})["input_ids"].astype(np.int64)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{reference} holds no prompt: {error}") from None
        return torch.from_numpy(ids)
    most = min(int(text_config(model.config).vocab_size), _MOST_TOKEN_ID)
    drawn = np.random.Generator(np.random.Philox(0)).integers(min(3, most - 1), most, (1, _PROMPT_TOKENS))
    return torch.from_numpy(drawn)


def _greedy(model: Any, ids: torch.Tensor) -> list[int]:
    """Greedy tokens behind a prompt, with the model's own cache."""
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=GREEDY_TOKENS,
        min_new_tokens=GREEDY_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return [int(token) for token in answer[0, ids.shape[1] :]]


def _unmodified(folder: Path) -> Any:
    config = config_of(folder)
    with quiet():
        model = model_class(config).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def _architecture(folder: Path) -> str:
    try:
        return model_class(config_of(folder)).__name__
    except TierdError:
        return "unknown"

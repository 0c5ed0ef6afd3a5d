"""The training loop: AdamW, a cosine over the given time or steps, resumable, with held-out evaluation."""

from __future__ import annotations

import math
import pickle
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from compute_node.training.corpus import Corpus, train_tokenizer
from compute_node.training.evaluate import evaluate
from compute_node.training.export import write_folder
from compute_node.training.model import Model, Shape
from compute_node.training.text import documents
from tierd.errors import StoreDamaged, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["Budget", "Recipe", "train"]


@dataclass(frozen=True)
class Recipe:
    """What the optimiser does; the defaults made the embedded model."""

    batch: int = 8  # windows per step
    peak_rate: float = 2e-3
    warmup: int = 50  # steps
    last_rate: float = 0.05  # of the peak
    decay: float = 0.1  # of matrices; norms have none
    clip: float = 1.0
    balance: float = 0.01
    z: float = 1e-4
    seed: int = 0
    save_every: float = 600.0  # seconds
    report_every: int = 20  # steps
    held_out_windows: int = 40


@dataclass(frozen=True)
class Budget:
    """How long to train in all, over every resumed run: minutes of the clock, or steps."""

    minutes: float = 0.0
    steps: int = 0

    def __post_init__(self) -> None:
        if (self.minutes > 0) == (self.steps > 0) or min(self.minutes, self.steps) < 0:
            raise UsageError(f"train for minutes or for steps, not {self.minutes} minutes and {self.steps} steps")

    def done(self, steps: int, seconds: float) -> float:
        """The part that is used up, from 0 to 1."""
        used = steps / self.steps if self.steps else seconds / (60 * self.minutes)
        return min(1.0, used)


class Run:
    """Model, optimiser and how far they have come; saved to and resumed from one file."""

    def __init__(self, shape: Shape, recipe: Recipe) -> None:
        torch.manual_seed(recipe.seed)
        self.shape = shape
        self.recipe = recipe
        self.model = Model(shape)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]  # the norms
        groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95))
        self.step = 0
        self.seconds = 0.0

    def save(self, path: Path) -> None:
        """Replace the file at `path` by the present state."""
        state = {
            "shape": asdict(self.shape),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        unfinished = path.with_suffix(".tmp")
        torch.save(state, unfinished)
        unfinished.replace(path)

    def resume(self, path: Path) -> None:
        """Go on from a saved state. Raises StoreDamaged or UsageError where it cannot be used."""
        try:
            state = torch.load(path, weights_only=True)
            saved = Shape(**state["shape"])
            if saved == self.shape:
                self.model.load_state_dict(state["model"])
                self.optimizer.load_state_dict(state["optimizer"])
                self.step, self.seconds = int(state["step"]), float(state["seconds"])
        except (OSError, EOFError, RuntimeError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
            message = str(error).partition("\n")[0]
            raise StoreDamaged(f"{path} cannot be resumed: {message}", hint="Remove it to start again.") from error
        if saved != self.shape:
            raise UsageError(f"{path} holds a model of other sizes: {saved}")

    def advance(self, tokens: NDArray[np.int32], done: float) -> float:
        """Take one step; the cross-entropy of its batch in nats per token."""
        recipe = self.recipe
        rate = recipe.peak_rate * min(1.0, (self.step + 1) / recipe.warmup)
        rate *= recipe.last_rate + (1 - recipe.last_rate) * 0.5 * (1 + math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        ids = self.batch(tokens)
        logits = self.model(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.optimizer.zero_grad()
        (loss + self.model.routing_loss(recipe.balance, recipe.z)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        self.optimizer.step()
        self.step += 1
        return float(loss.item())

    def batch(self, tokens: NDArray[np.int32]) -> Tensor:
        """Windows [batch, context + 1] from random places; the step alone decides which."""
        random = np.random.default_rng([self.recipe.seed, self.step])
        starts = random.integers(0, len(tokens) - self.shape.context, self.recipe.batch)
        windows = np.stack([tokens[start : start + self.shape.context + 1] for start in starts])
        return torch.from_numpy(windows.astype(np.int64))


def prepare(text: Path, out: Path, shape: Shape) -> Corpus:
    """Tokenizer and token ids, made once per output folder."""
    tokens = out / "tokens.npz"
    tokenizer = out / "checkpoint" / "tokenizer.json"
    if tokens.exists() and tokenizer.exists():
        return Corpus.load(tokens)
    texts = documents(text)
    if not tokenizer.exists():
        train_tokenizer(texts, shape.vocabulary, tokenizer)
    corpus = Corpus.encode(texts, tokenizer, context=shape.context)
    corpus.save(tokens)
    return corpus


def train(
    text: Path,
    out: Path,
    budget: Budget,
    *,
    shape: Shape | None = None,
    recipe: Recipe | None = None,
    tell: Callable[[str], None] = print,
) -> float:
    """Train on the *.txt files of `text` until the budget is used up; returns the held-out perplexity.

    `out` gets `state.pt` (resumed from if it is there), `tokens.npz` and the folder `checkpoint`, which transformers
    loads. All three are brought up to date every ten minutes and at the end.
    """
    recipe = recipe or Recipe()
    (out / "checkpoint").mkdir(parents=True, exist_ok=True)
    state = out / "state.pt"
    run = Run(shape or Shape(), recipe)
    corpus = prepare(text, out, run.shape)
    if state.exists():
        run.resume(state)
        tell(f"resumed after step {run.step:,}, {run.seconds / 60:.1f} minutes")
    parameters = sum(p.numel() for p in run.model.parameters())
    tell(f"{parameters:,} parameters, {len(corpus.train):,} training and {len(corpus.held_out):,} held-out tokens")

    earlier, start = run.seconds, time.monotonic()
    resumed_at, saved = run.step, start
    while (done := budget.done(run.step, run.seconds)) < 1:
        loss = run.advance(corpus.train, done)
        now = time.monotonic()
        run.seconds = earlier + now - start
        if run.step % recipe.report_every == 0:
            speed = (run.step - resumed_at) * recipe.batch * run.shape.context / (now - start)
            tell(f"step {run.step:,}  loss {loss:.3f}  {done:.1%} done  {speed:,.0f} tokens/s")
        if now - saved > recipe.save_every:
            saved = now
            checkpoint(run, corpus, out, tell)
    return checkpoint(run, corpus, out, tell)


def checkpoint(run: Run, corpus: Corpus, out: Path, tell: Callable[[str], None]) -> float:
    """Evaluate on held-out text, export and save; the perplexity."""
    result = evaluate(run.model, corpus.held_out, windows=run.recipe.held_out_windows)
    write_folder(run.model, out / "checkpoint")
    run.save(out / "state.pt")
    tell(
        f"step {run.step:,}  held-out perplexity {result.perplexity:.1f}  "
        f"least and most used expert {result.use.min():.4f} and {result.use.max():.4f}"
    )
    return result.perplexity

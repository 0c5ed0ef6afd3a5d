"""Perplexity and expert use of a checkpoint folder: `python -m compute_node.training.evaluate FOLDER --text DIR`.

Windows follow one another without overlap, each a text of its own; every token of a window but the first is
predicted from the ones before it, and one more after the last. Weights as stored, float32 arithmetic.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from compute_node.training.corpus import Corpus
from compute_node.training.export import load_model
from compute_node.training.text import documents
from tierd.errors import TierdError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from compute_node.training.model import Model

__all__ = ["Evaluation", "evaluate", "main"]


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per token, and what the routers chose.

    `use` [layers, experts] is each expert's share of its layer's choices; `repeated` [layers] the share of choices
    that the previous token of the window had made, too.
    """

    tokens: int
    loss: float
    use: NDArray[np.float64]
    repeated: NDArray[np.float64]

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss)


def evaluate(model: Model, ids: NDArray[np.int32], *, windows: int = 0) -> Evaluation:
    """Run windows of the model's training context over `ids`: all of them, or `windows` spread evenly."""
    shape = model.shape
    starts = np.arange(0, len(ids) - shape.context, shape.context)
    if windows and windows < len(starts):
        starts = np.linspace(0, len(ids) - shape.context - 1, windows).astype(int)
    loss = 0.0
    counts = np.zeros((shape.layers, shape.experts))
    repeated = np.zeros(shape.layers)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for start in starts:
            window = torch.from_numpy(ids[start : start + shape.context + 1].astype(np.int64))
            logits = model(window[None, :-1])[0]
            loss += functional.cross_entropy(logits, window[1:]).item()
            for layer, block in enumerate(model.blocks):
                counts[layer] += block.experts.counts.numpy()
                chosen = block.experts.chosen
                repeated[layer] += (chosen[1:, :, None] == chosen[:-1, None, :]).any(-1).double().mean().item()
    model.train(was_training)
    return Evaluation(
        tokens=len(starts) * shape.context,
        loss=loss / len(starts),
        use=counts / counts.sum(1, keepdims=True),
        repeated=repeated / len(starts),
    )


def report(name: str, result: Evaluation) -> None:
    """Print an evaluation, layer by layer."""
    print(f"{name}: perplexity {result.perplexity:.1f} over {result.tokens:,} tokens")
    for layer, use in enumerate(result.use):
        print(
            f"  layer {layer}: least and most used expert {use.min():.4f} and {use.max():.4f} of the choices, "
            f"{result.repeated[layer]:.2f} as the token before"
        )


def main() -> None:
    """Evaluate the folder that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m compute_node.training.evaluate", description=__doc__)
    parser.add_argument("folder", type=Path, help="checkpoint folder written by the training")
    parser.add_argument("--text", type=Path, required=True, help="folder of the *.txt files it was trained on")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        model = load_model(arguments.folder)
        texts = documents(arguments.text)
        corpus = Corpus.encode(texts, arguments.folder / "tokenizer.json", context=model.shape.context)
        held_out = evaluate(model, corpus.held_out)
        report("held-out text", held_out)
        windows = held_out.tokens // model.shape.context
        report("training text", evaluate(model, corpus.train, windows=windows))
    except TierdError as error:
        parser.exit(error.exit_code, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()

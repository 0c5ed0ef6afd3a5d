"""Tokenizer and token ids of the training text."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from tierd.errors import StoreDamaged, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["Corpus", "held_out_text", "train_tokenizer"]

SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>")
END_OF_TEXT = 0
PIECE = 10_000  # characters given to the tokenizer's trainer at once
HELD_OUT = 0.02  # the end of every book


def train_tokenizer(texts: Sequence[str], vocabulary: int, path: Path) -> None:
    """Train a byte-level BPE on the texts and save it as `tokenizer.json`."""

    def pieces() -> Iterator[str]:
        for text in texts:
            for start in range(0, len(text), PIECE):
                yield text[start : start + PIECE]

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces(), trainer)
    tokenizer.save(str(path))


def held_out_text(texts: Sequence[str], tokenizer_path: Path) -> str:
    """What a model with this tokenizer was not trained on, as text: the end of every book, one after the other."""
    tokenizer = _tokenizer(tokenizer_path)
    ends = []
    for text in texts:
        ids = tokenizer.encode(text).ids
        ends.append(tokenizer.decode(ids[_cut(ids) :]).strip())
    return "\n\n".join(ends) + "\n"


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers package raises nothing narrower
        raise StoreDamaged(f"{path} cannot be read: {error}") from error


def _cut(ids: Sequence[int] | NDArray[np.int32]) -> int:
    """Where the held-out part of a book begins."""
    return int(len(ids) * (1 - HELD_OUT))


@dataclass(frozen=True)
class Corpus:
    """Token ids for training and for evaluation; `held_out` are the last 2 % of every book."""

    train: NDArray[np.int32]
    held_out: NDArray[np.int32]

    @classmethod
    def encode(cls, texts: Sequence[str], tokenizer_path: Path, *, context: int) -> Corpus:
        """Encode the texts; an end-of-text token follows each book's training part.

        Raises UsageError where either part is shorter than one window of `context` tokens and its successor.
        """
        tokenizer = _tokenizer(tokenizer_path)
        train, held_out = [], []
        for text in texts:
            ids = np.array(tokenizer.encode(text).ids, np.int32)
            cut = _cut(ids)
            train += [ids[:cut], np.array([END_OF_TEXT], np.int32)]
            held_out.append(ids[cut:])
        corpus = cls(np.concatenate(train), np.concatenate(held_out))
        shortest = min(len(corpus.train), len(corpus.held_out))
        if shortest <= context:
            raise UsageError(
                f"the text is too short: {len(corpus.train):,} training and {len(corpus.held_out):,} held-out "
                f"tokens, where one window has {context:,}",
                hint=f"Give at least {round((context + 1) / HELD_OUT):,} tokens of text.",
            )
        return corpus

    def save(self, path: Path) -> None:
        """Keep the ids, so that a resumed run need not encode again."""
        np.savez(path, train=self.train, held_out=self.held_out)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Read what `save` wrote. Raises StoreDamaged where the file is no such archive."""
        try:
            with path.open("rb") as file, np.load(file) as arrays:
                return cls(arrays["train"], arrays["held_out"])
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise StoreDamaged(f"{path} cannot be read: {error}", hint="Remove it to encode again.") from error

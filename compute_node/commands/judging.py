"""What `compute-node eval` does: it scores a text, or the choices of questions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console
from rich.progress import Progress

from compute_node.commands.opening import Opened, open_store
from compute_node.engine.likelihood import continuation_likelihood, text_likelihood
from compute_node.settings import NodeSettings
from compute_node.text.tokenizer import Tokenizer
from tierd.client.private_daemon import PrivateDaemon
from tierd.errors import UsageError

__all__ = ["judge_model"]


class _Question(BaseModel):
    """One line of a file of choices."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    context: Annotated[str, Field(min_length=1)]
    choices: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=2)]
    answer: Annotated[int, Field(ge=0)] | None = None


def judge_model(
    file: Path,
    store: str,
    settings: NodeSettings,
    *,
    daemon: PrivateDaemon | None,
    overlap: int | None,
    choices: bool,
    as_json: bool,
) -> None:
    """Scores a file and prints what was found.

    Args:
        file: UTF-8 text; or, with `choices`, JSON lines of questions.
        store: as it was named.
        settings: of the node.
        daemon: that was begun for the store; see `open_store`.
        overlap: tokens that a window repeats of the last; None: half of it.
        choices: the file holds questions.
        as_json: prints one JSON object instead of text.

    Raises:
        UsageError: the file is not what it should be; TierdError of the store.
    """
    text = _read(file)
    questions = _questions(file, text) if choices else []
    console = Console(stderr=True, highlight=False)
    with open_store(store, settings, name="eval", daemon=daemon, console=console) as opened:
        tokenizer = opened.tokenizer
        if tokenizer is None:
            raise UsageError(f"{store} has no tokenizer, which eval needs")
        if choices:
            found = _judge(opened, tokenizer, questions)
        else:
            found = _perplexity(opened, tokenizer.encode(text), overlap, console)
        manifest = opened.source.store.manifest
        found |= {
            "numerics": opened.model.numerics,
            "experts": str(manifest.expert_format),
            "dense": str(manifest.dense_format),
            "kernel_path": opened.kernel_path,
            "fingerprint": opened.source.store.fingerprint,
        }
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    out = Console(highlight=False)
    if choices:
        right = "" if found["accuracy"] is None else f", {100 * found['accuracy']:.1f} % right"
        out.print(f"{len(questions)} questions{right}", markup=False)
    else:
        out.print(f"perplexity {found['perplexity']:.4f} over {found['tokens']:,} tokens", markup=False)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8: byte {error.start}") from None


def _questions(file: Path, text: str) -> list[_Question]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            question = _Question.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UsageError(f"{file} line {number}: {where or 'JSON'}: {first['msg']}") from None
        if question.answer is not None and question.answer >= len(question.choices):
            raise UsageError(f"{file} line {number}: answer {question.answer} of {len(question.choices)} choices")
        found.append(question)
    if not found:
        raise UsageError(f"{file} has no questions")
    return found


def _perplexity(opened: Opened, tokens: list[int], overlap: int | None, console: Console) -> dict[str, Any]:
    window = opened.model.context
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("scoring", total=max(1, len(tokens) - 1))
        found = text_likelihood(
            opened.model,
            tokens,
            window=window,
            overlap=window // 2 if overlap is None else overlap,
            progress=lambda done: bar.update(task, completed=done),
        )
    return {"perplexity": found.perplexity, "tokens": found.tokens, "nats_per_token": found.nats / found.tokens}


def _judge(opened: Opened, tokenizer: Tokenizer, questions: list[_Question]) -> dict[str, Any]:
    """Log-likelihoods of all choices, and how often the likeliest per token is the answer."""
    rows, right, asked = [], 0, 0
    for question in questions:
        context = tokenizer.encode(question.context)
        scores, best = [], []
        for choice in question.choices:
            tokens = tokenizer.encode(choice, special_tokens=False)
            value = continuation_likelihood(opened.model, context, tokens)
            scores.append({"log_likelihood": value, "tokens": len(tokens)})
            best.append(value / len(tokens))
        chosen = best.index(max(best))
        rows.append({"choices": scores, "chosen": chosen, "answer": question.answer})
        if question.answer is not None:
            asked += 1
            right += int(chosen == question.answer)
    return {"questions": rows, "accuracy": right / asked if asked else None}

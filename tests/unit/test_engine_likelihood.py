from __future__ import annotations

import json
import math

import numpy as np
import pytest
import typer

from compute_node import embedded
from compute_node.commands import evaluate
from compute_node.engine.likelihood import continuation_likelihood, log_probabilities, text_likelihood
from compute_node.engine.model import Model, ModelOptions
from tierd.checkpoint.convert import convert
from tierd.client.in_process import InProcess
from tierd.client.source import Phase
from tierd.errors import LimitExceeded, UsageError
from tierd.store.store import ExpertStore

TOKENS = [5, 77, 301, 12, 900, 41, 7, 7, 1200, 33, 18, 250]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("embedded") / "store"
    convert(embedded.path(), path, experts="int4-g64", dense="bf16")
    return path


@pytest.fixture(scope="module")
def model(path):
    with Model(InProcess(ExpertStore.open(path)), ModelOptions(threads=1, context=32, rows=5)) as model:
        yield model


@pytest.fixture(scope="module")
def logits(model):
    """Logits of every token after all before it, one token to a step."""
    sequence = model.cache.take()
    rows = [model.extend(sequence, [token], phase=Phase.DECODE)[0] for token in TOKENS]
    model.cache.give_back(sequence)
    return np.stack(rows)


def expected(logits, first):
    wide = logits[first - 1 : -1].astype(np.float64)
    chosen = wide[np.arange(len(wide)), TOKENS[first:]]
    return chosen - np.log(np.exp(wide).sum(axis=1))


def test_log_probabilities_are_those_of_a_softmax():
    logits = np.array([[1, 2, 3], [1000, 0, 0], [-1000, -1001, -1000]], np.float32)
    found = log_probabilities(logits, [2, 1, 0])
    assert found[0] == pytest.approx(3 - math.log(math.e + math.e**2 + math.e**3))
    assert found[1] == pytest.approx(-1000)
    assert found[2] == pytest.approx(-math.log(2 + math.exp(-1)))


def test_one_window_scores_every_token_but_the_first(model, logits):
    steps = []
    found = text_likelihood(model, TOKENS, window=32, overlap=16, progress=steps.append)
    assert found.tokens == len(TOKENS) - 1 == steps[-1]
    assert found.nats == pytest.approx(-expected(logits, 1).sum(), rel=1e-12)
    assert found.perplexity == pytest.approx(math.exp(found.nats / 11))
    assert model.cache.open_places == 1


def test_windows_score_each_token_once_after_what_they_repeat(model):
    found = text_likelihood(model, TOKENS, window=6, overlap=4)
    by_hand = [continuation_likelihood(model, TOKENS[:1], TOKENS[1:6])]
    later = [(TOKENS[at - 4 : at], TOKENS[at : at + 2]) for at in range(6, 12, 2)]
    by_hand += [continuation_likelihood(model, *pair) for pair in later]
    assert found.tokens == 11
    assert found.nats == pytest.approx(-sum(by_hand), rel=1e-12)


def test_a_continuation_is_scored_after_its_context(model, logits):
    assert continuation_likelihood(model, TOKENS[:7], TOKENS[7:]) == pytest.approx(expected(logits, 7).sum(), rel=1e-12)
    long = [3] * 100 + TOKENS[:7]
    assert continuation_likelihood(model, long, TOKENS[7:]) == continuation_likelihood(model, long[-27:], TOKENS[7:])


def test_what_cannot_be_scored_is_refused(model):
    with pytest.raises(UsageError, match="less than two"):
        text_likelihood(model, [1], window=8, overlap=4)
    for window, overlap in ((33, 4), (1, 1), (8, 8), (8, 0)):
        with pytest.raises(UsageError, match="windows of"):
            text_likelihood(model, TOKENS, window=window, overlap=overlap)
    with pytest.raises(UsageError, match="at least one token"):
        continuation_likelihood(model, [], [1])
    with pytest.raises(LimitExceeded, match="does not fit"):
        continuation_likelihood(model, [1], [2] * 32)


def run(capsys, *arguments):
    app = typer.Typer()
    evaluate.register(app)
    app([*arguments, "--in-process", "--threads", "1", "--json"], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


def test_the_command_prints_perplexity_and_names_what_was_judged(capsys, path, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged, that a single man must be in want of a wife. " * 3)
    found = {n: run(capsys, str(text), str(path), "--context", "40", "--numerics", n) for n in ("exact", "fast")}
    assert found["exact"]["tokens"] == found["fast"]["tokens"] > 40
    assert found["exact"]["perplexity"] != found["fast"]["perplexity"]
    assert found["fast"]["perplexity"] == pytest.approx(found["exact"]["perplexity"], rel=0.05)
    assert (found["fast"]["numerics"], found["fast"]["experts"]) == ("fast", "int4-g64")


def test_choices_are_scored_and_the_likeliest_is_chosen(capsys, path, tmp_path):
    lines = tmp_path / "choices.jsonl"
    question = {"context": "It was the best of", "choices": [" times and it was", " zxq kkv 9%&"], "answer": 0}
    lines.write_text(json.dumps(question) + "\n\n" + json.dumps(question | {"answer": 1}) + "\n")
    found = run(capsys, str(lines), str(path), "--choices")
    assert [row["chosen"] for row in found["questions"]] == [0, 0]
    assert found["accuracy"] == 0.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"context": "a", "choices": ["b"]}', "line 1: choices"),
        ('{"context": "a", "choices": ["b", "c"], "answer": 2}', "answer 2 of 2"),
        ("nonsense", "line 1: JSON"),
        ("", "no questions"),
    ],
)
def test_bad_choices_are_refused_by_line(capsys, path, tmp_path, content, message):
    lines = tmp_path / "choices.jsonl"
    lines.write_text(content)
    with pytest.raises(UsageError, match=message):
        run(capsys, str(lines), str(path), "--choices")


def test_a_text_that_is_no_text_is_refused(capsys, path, tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        run(capsys, str(tmp_path / "absent"), str(path))
    broken = tmp_path / "latin1"
    broken.write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match="not UTF-8"):
        run(capsys, str(broken), str(path))

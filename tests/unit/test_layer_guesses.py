"""What was learned of layers comes back from a file as it was, and nothing else does."""

from __future__ import annotations

import numpy as np
import pytest

from compute_node.prediction.layer_guesses import LayerGuesses
from tierd.errors import UsageError

EXPERTS, TOP_K = 8, 2


def taught(steps=64):
    guesses, rng = LayerGuesses([EXPERTS] * 2, TOP_K), np.random.default_rng(0)
    layer, absent = guesses.of(1, 1), np.ones(EXPERTS, np.bool_)
    for _ in range(steps):
        look = rng.normal(size=EXPERTS).astype(np.float32)
        logits = look[::-1].copy()
        guess = layer.guess(look, np.log(rng.random(EXPERTS)).astype(np.float32), absent)
        layer.learn(guess, np.argsort(-logits)[:TOP_K].astype(np.int32), logits)
    return guesses


def said(guesses):
    look, token = np.linspace(-2, 2, EXPERTS, dtype=np.float32), np.full(EXPERTS, -1.0, np.float32)
    return guesses.of(1, 1).guess(look, token, np.ones(EXPERTS, np.bool_))


def test_what_was_learned_comes_back():
    first, again = taught(), LayerGuesses([EXPERTS] * 2, TOP_K)
    assert said(again).chosen_by == said(first).chosen_by == "corrected"
    assert not np.allclose(said(first).probabilities, said(again).probabilities)
    again.restore(first.as_arrays())
    assert np.allclose(said(first).scores["corrected"], said(again).scores["corrected"], atol=1e-3)
    assert np.allclose(said(first).probabilities, said(again).probabilities)
    assert again.of(1, 1).recall == first.of(1, 1).recall


def test_learning_goes_on_after_it_came_back():
    again = LayerGuesses([EXPERTS] * 2, TOP_K)
    again.restore(taught(40).as_arrays())
    layer, absent = again.of(1, 1), np.ones(EXPERTS, np.bool_)
    rng = np.random.default_rng(5)
    for _ in range(400):
        look = rng.normal(size=EXPERTS).astype(np.float32)
        layer.learn(layer.guess(look, -np.abs(look), absent), np.argsort(-look)[:TOP_K].astype(np.int32), look)
    scores = said(again).scores["corrected"]
    assert set(np.argsort(-scores)[:TOP_K].tolist()) == {EXPERTS - 1, EXPERTS - 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("1.1.recall", None),
        ("1.1.recall", np.full(4, 2.0)),
        ("1.1.recall", np.full(3, 0.5)),
        ("1.1.calibration", np.zeros((4, 2, 24))),
        ("1.1.calibration", np.ones((4, 2, 3))),
        ("1.1.gram", np.ones((3, 3), np.float32)),
        ("1.1.gram", np.zeros((17, 17), np.float32)),
        ("1.1.cross", np.full((17, 8), np.nan, np.float32)),
        ("1.1.samples", np.array(-1)),
        ("1.1.samples", None),
    ],
)
def test_what_fits_no_such_model_is_refused(name, value):
    arrays = taught(10).as_arrays()
    del arrays[name]
    if value is not None:
        arrays[name] = value
    with pytest.raises(UsageError, match="saved predictor"):
        LayerGuesses([EXPERTS] * 2, TOP_K).restore(arrays)

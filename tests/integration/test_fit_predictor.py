"""`compute-node fit-predictor` on texts of the embedded model; what it saves is where later runs begin."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from inside import commands

from compute_node.commands import fit_predictor, learning
from compute_node.prediction.fitting import Fit
from compute_node.prediction.layer_guesses import LayerGuesses
from compute_node.prediction.table_file import PREDICTOR, TableFile
from tierd.errors import UsageError
from tierd.store.store import ExpertStore

HELD = Path(__file__).parents[1] / "bench" / "traces" / "held.npz"
WINDOW, TEXTS = 48, 12


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def trace(tmp_path):
    """Short texts of the held-out trace."""
    with np.load(HELD) as content:
        arrays, window = dict(content), int(content["window"])
    rows = np.concatenate([np.arange(n * window, n * window + WINDOW) for n in range(TEXTS)])
    path = tmp_path / "texts.npz"
    arrays |= {"tokens": arrays["tokens"][rows], "experts": arrays["experts"][rows], "window": np.array(WINDOW)}
    np.savez(path, **arrays)
    return path


def fit(store, *arguments):
    run = commands(fit_predictor)(store, *arguments, "--in-process", "--threads", "1", "--json")
    return json.loads(run.output)


def test_a_fit_foresees_more_than_the_plain_router_on_texts_that_were_held_out_and_is_kept(embedded_store, trace):
    found = fit(embedded_store, trace)
    assert found["baseline_recall_on_misses"] < found["recall_on_misses"] < 1
    assert found["unfitted_recall_on_misses"] < found["recall_on_misses"]
    assert (found["train_tokens"], found["held_tokens"]) == (9 * WINDOW, 3 * WINDOW)
    store = ExpertStore.open(embedded_store)
    saved = Path(found["saved"])
    file = TableFile(saved.parent, store.fingerprint, PREDICTOR)
    assert file.path == saved
    guesses = LayerGuesses([32] * 8, 4)
    fresh = guesses.of(1, 3).recall
    assert file.load(guesses) == ""
    assert guesses.of(1, 3).recall != fresh


def test_a_fit_that_finds_nothing_is_not_kept(embedded_store, trace, tmp_path, monkeypatch):
    report = {"recall_on_misses": 0.5, "unfitted_recall_on_misses": 0.5, "baseline_recall_on_misses": 0.4}
    monkeypatch.setattr(learning, "fit_guesses", lambda *_, **__: Fit(LayerGuesses([32] * 8, 4), report))
    assert fit(embedded_store, trace)["saved"] is None
    assert not (tmp_path / "state").exists()


def test_traces_of_another_model_and_too_short_ones_are_refused(embedded_store, trace, tmp_path):
    with np.load(trace) as content:
        arrays = dict(content)
    other = tmp_path / "other.npz"
    np.savez(other, **arrays | {"experts": arrays["experts"][:, :4]})
    with pytest.raises(UsageError, match="another model"):
        fit(embedded_store, other)
    short = tmp_path / "short.npz"
    np.savez(short, **arrays | {"tokens": arrays["tokens"][:WINDOW], "experts": arrays["experts"][:WINDOW]})
    with pytest.raises(UsageError, match="1 texts of at least 8 tokens"):
        fit(embedded_store, short)

"""Models of random shapes against transformers itself, which has to be installed (extra `oracle`)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from oracles.random_configs import RANDOM_CONFIGS

from compute_node.engine.model import Model, ModelOptions
from compute_node.engine.oracle import compare, read_reference
from tierd.checkpoint.convert import convert
from tierd.client.in_process import InProcess
from tierd.store.store import ExpertStore


@pytest.mark.oracle
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", RANDOM_CONFIGS)
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_any_shape_of_a_family_gives_the_logits_routes_and_tokens_of_transformers(family, data):
    make_oracles = pytest.importorskip("oracles.make_oracles")
    make_oracles.torch.set_num_threads(1)
    make_oracles.transformers.utils.logging.disable_progress_bar()
    shape = data.draw(RANDOM_CONFIGS[family])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            make_oracles.make("random", make_oracles.Oracle(family, shape), folder, seed=1)
        except SystemExit:  # no draw of the weights whose tokens and routes do not hinge on rounding
            reject()
        convert(folder / "random", folder / "store", experts="f32", dense="f32")
        with Model(InProcess(ExpertStore.open(folder / "store")), ModelOptions(threads=1, rows=9)) as model:
            result = compare(model, read_reference(folder / "random" / "ref.npz"))
        assert result.passed, result

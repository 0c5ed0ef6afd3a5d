"""Options of a node that do not go together are refused before anything takes long."""

from __future__ import annotations

import pytest

from compute_node.commands.opening import open_store
from compute_node.commands.options import load_settings
from tierd.errors import UsageError


@pytest.mark.parametrize("asked", [{"device": "cuda"}, {"vram": "1GiB"}])
def test_a_device_of_the_native_engine_is_refused_before_a_store_is_opened(asked):
    with pytest.raises(UsageError, match="for --engine transformers"):
        load_settings(None, asked, engine="native")


@pytest.mark.parametrize("asked", [{"device": "cuda"}, {"vram": "1GiB"}])
def test_where_the_engine_is_chosen_a_device_is_refused_before_the_weights_are_read(asked, embedded_store):
    settings = load_settings(None, asked, in_process=True)

    def loading(*_):
        pytest.fail("the tokenizer was read")

    with (
        pytest.raises(UsageError, match="for --engine transformers"),
        open_store(str(embedded_store), settings, name="test", check=loading),
    ):
        pass

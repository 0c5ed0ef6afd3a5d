from __future__ import annotations

import json

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

from compute_node import embedded

FOLDER = embedded.path()


def read_json(name):
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def stored_tensors():
    """(name, file, dtype, shape) of every tensor in the shards."""
    for file in sorted(FOLDER.glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (a safe_open handle is no mapping)
                part = tensors.get_slice(name)
                yield name, file.name, part.get_dtype(), tuple(part.get_shape())


def test_the_index_names_exactly_the_tensors_that_the_shards_hold():
    index = read_json("model.safetensors.index.json")
    found = {name: file for name, file, _, _ in stored_tensors()}
    assert found == index["weight_map"]
    size = sum(2 * int(np.prod(shape)) for _, _, _, shape in stored_tensors())
    assert size == index["metadata"]["total_size"]


def test_every_shard_is_smaller_than_fifty_megabytes():
    shards = sorted(FOLDER.glob("*.safetensors"))
    assert [shard.name for shard in shards] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert all(shard.stat().st_size < 50_000_000 for shard in shards)


def test_all_experts_of_the_configuration_are_there_in_bfloat16():
    config = read_json("config.json")
    tensors = {name: (dtype, shape) for name, _, dtype, shape in stored_tensors()}
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        for expert in range(config["num_experts"]):
            name = f"model.layers.{layer}.mlp.experts.{expert}."
            assert tensors[f"{name}gate_proj.weight"] == ("BF16", (inner, hidden))
            assert tensors[f"{name}up_proj.weight"] == ("BF16", (inner, hidden))
            assert tensors[f"{name}down_proj.weight"] == ("BF16", (hidden, inner))
    assert {dtype for dtype, _ in tensors.values()} == {"BF16"}


def test_the_tokenizer_fits_the_configuration_and_gives_text_back():
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == read_json("config.json")["vocab_size"]
    text = "It was a fine morning — “said” naïve Zoë,\n\n  20,000 £."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.token_to_id("<|endoftext|>") == read_json("config.json")["eos_token_id"]


def test_the_chat_template_joins_contents_and_adds_nothing():
    template = ImmutableSandboxedEnvironment().from_string(read_json("tokenizer_config.json")["chat_template"])
    messages = [
        {"role": "system", "content": "It was"},
        {"role": "user", "content": "a fine\nmorning"},
        {"role": "assistant", "content": "and"},
    ]
    assert template.render(messages=messages, add_generation_prompt=True) == "It was\na fine\nmorning\nand"


def test_the_sources_are_named_beside_the_weights():
    notice = (FOLDER / "NOTICE").read_text(encoding="utf-8")
    for words in ("Chip Chapin", "Julia Silge", "Devil's Dictionary", "Jargon File"):
        assert words in notice
    assert (FOLDER / "MODEL_CARD.md").exists()

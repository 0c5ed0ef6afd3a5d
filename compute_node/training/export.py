"""Write a trained model as a Hugging Face folder under Qwen3-MoE's published names, and read one back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from compute_node.training.model import Model, Shape
from tierd.errors import StoreDamaged, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

__all__ = ["load_model", "published_tensors", "write_folder", "write_weights"]

INDEX = "model.safetensors.index.json"
END_OF_TEXT = "<|endoftext|>"

# The model has seen plain text only, never a chat: messages are one text, continued.
CHAT_TEMPLATE = "{% for message in messages %}{{ '' if loop.first else '\\n' }}{{ message.content }}{% endfor %}"


def published_tensors(model: Model) -> dict[str, Tensor]:
    """The parameters by their published names, expert by expert; views of the model's own memory."""
    inner = model.shape.inner
    tensors = {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.head.weight,
    }
    for layer, block in enumerate(model.blocks):
        prefix = f"model.layers.{layer}."
        attention, experts = block.attention, block.experts
        tensors |= {
            f"{prefix}input_layernorm.weight": block.attention_norm.weight,
            f"{prefix}post_attention_layernorm.weight": block.experts_norm.weight,
            f"{prefix}self_attn.q_proj.weight": attention.query.weight,
            f"{prefix}self_attn.k_proj.weight": attention.key.weight,
            f"{prefix}self_attn.v_proj.weight": attention.value.weight,
            f"{prefix}self_attn.o_proj.weight": attention.output.weight,
            f"{prefix}self_attn.q_norm.weight": attention.query_norm.weight,
            f"{prefix}self_attn.k_norm.weight": attention.key_norm.weight,
            f"{prefix}mlp.gate.weight": experts.router.weight,
        }
        for expert in range(model.shape.experts):
            name = f"{prefix}mlp.experts.{expert}."
            tensors |= {
                f"{name}gate_proj.weight": experts.gate_up[expert, :inner],
                f"{name}up_proj.weight": experts.gate_up[expert, inner:],
                f"{name}down_proj.weight": experts.down[expert],
            }
    return {name: tensor.detach() for name, tensor in tensors.items()}


def published_config(shape: Shape) -> dict[str, object]:
    """The `config.json` of a model of this shape."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner * shape.top_k,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": shape.inner,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write readable JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_weights(tensors: Mapping[str, Tensor], layers: int, folder: Path, *, shards: int) -> None:
    """Write the tensors as bfloat16 into `shards` files of whole layers, with an index.

    The embedding goes with the first layers, the final norm and the head with the last ones.
    """
    files: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[1] == "layers":
            shard = int(parts[2]) * shards // layers
        else:
            shard = 0 if parts[1] == "embed_tokens" else shards - 1
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        files.setdefault(file, {})[name] = tensor.to(torch.bfloat16).contiguous().clone()
    for file, content in files.items():
        save_file(content, folder / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for content in files.values() for tensor in content.values())
    weight_map = {name: file for file, content in files.items() for name in content}
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX, index)


def write_folder(model: Model, folder: Path, *, shards: int = 2) -> None:
    """Write everything but `tokenizer.json` (see `compute_node.training.corpus`) into an existing folder."""
    write_weights(published_tensors(model), model.shape.layers, folder, shards=shards)
    write_json(folder / "config.json", published_config(model.shape))
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0})
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.shape.positions,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def load_model(folder: Path) -> Model:
    """Read a folder that `write_folder` wrote; weights as stored, arithmetic in float32.

    Raises UsageError where the folder holds another architecture, StoreDamaged where tensors are missing or have
    another shape.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        files = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        shape = Shape(
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            experts=config["num_experts"],
            top_k=config["num_experts_per_tok"],
            inner=config["moe_intermediate_size"],
            context=min(Shape.context, config["max_position_embeddings"]),
            positions=config["max_position_embeddings"],
            rope_theta=config["rope_theta"],
            eps=config["rms_norm_eps"],
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{folder} is not a checkpoint folder: {error}") from error
    if published_config(shape) != config:
        raise UsageError(
            f"{folder / 'config.json'} describes another model than the training code makes",
            hint="Only folders written by compute_node.training can be loaded here.",
        )
    model = Model(shape)
    # Views of the parameters: filling them fills the model.
    expected = published_tensors(model)
    for file in sorted(files):
        try:
            with safe_open(folder / file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (a safe_open handle is no mapping)
                    parameter, stored = expected.pop(name), tensors.get_tensor(name)
                    if parameter.shape != stored.shape:
                        raise StoreDamaged(f"{folder / file}: {name} has the shape {tuple(stored.shape)}")
                    parameter.copy_(stored)
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            raise StoreDamaged(f"{folder / file} does not fit {folder / 'config.json'}: {error}") from error
    if expected:
        raise StoreDamaged(f"{folder} lacks the tensor {min(expected)}")
    return model

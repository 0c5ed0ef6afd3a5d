"""Sizes of real models, as the config.json that their checkpoints carry; weights are random, sizes are what counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tierd.errors import UsageError

__all__ = ["GEOMETRIES", "BenchGeometry", "geometry_named"]


@dataclass(frozen=True, slots=True)
class BenchGeometry:
    """A model's sizes.

    Attributes:
        name: as given on the command line.
        config: config.json of the whole model.
        note: where it differs from the published model, or nothing.
    """

    name: str
    config: dict[str, Any]
    note: str = ""

    @property
    def layers(self) -> int:
        """Layers of the whole model."""
        return int(self.config["num_hidden_layers"])

    def cut(self, layers: int | None, experts: int | None = None) -> dict[str, Any]:
        """Config of a part of the model: so many layers, and the same share of the vocabulary.

        The bytes of a token are then that share of the whole model's, so that speeds project by the layers alone.

        Args:
            layers: how many; None: all.
            experts: routed experts of a layer; None: all.

        Raises:
            UsageError: more than the model has, or none.
        """
        kept = self.layers if layers is None else layers
        if not 1 <= kept <= self.layers:
            raise UsageError(f"--layers {layers} is outside 1 to {self.layers}, those of {self.name}")
        key = next(key for key in ("num_local_experts", "n_routed_experts", "num_experts") if key in self.config)
        whole = int(self.config[key])
        count = whole if experts is None else experts
        if not int(self.config["num_experts_per_tok"]) <= count <= whole:
            least = self.config["num_experts_per_tok"]
            raise UsageError(f"--experts {experts} is outside {least} to {whole}, those of a layer of {self.name}")
        vocabulary = max(256, int(self.config["vocab_size"]) * kept // self.layers)
        return self.config | {"num_hidden_layers": kept, "vocab_size": vocabulary, key: count}


GEOMETRIES: Final = {
    geometry.name: geometry
    for geometry in (
        BenchGeometry(
            "olmoe-1b-7b",
            {
                "model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024,
                "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_act": "silu",
                "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "num_experts": 64,
                "num_experts_per_tok": 8, "norm_topk_prob": False, "tie_word_embeddings": False,
            },
        ),
        BenchGeometry(
            "qwen3-30b-a3b",
            {
                "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
                "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
                "num_key_value_heads": 4, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 40960,
                "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "num_experts": 128, "num_experts_per_tok": 8,
                "norm_topk_prob": True, "tie_word_embeddings": False,
            },
        ),
        BenchGeometry(
            "embedded",
            {
                "model_type": "qwen3_moe", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512,
                "moe_intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_experts": 32, "num_experts_per_tok": 4,
                "norm_topk_prob": True, "tie_word_embeddings": False,
            },
            note="the sizes of the embedded model, which fits a processor's cache",
        ),
        BenchGeometry(
            "mixtral-8x7b",
            {
                "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
                "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
                "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
                "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False,
            },
        ),
        BenchGeometry(
            "qwen3-next-80b-a3b",
            {
                "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
                "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_hidden_layers": 48,
                "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "hidden_act": "silu",
                "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
                "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
                "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_theta": 10000000.0,
                "partial_rotary_factor": 0.25, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True,
                "tie_word_embeddings": False,
            },
        ),
        BenchGeometry(
            "gpt-oss-120b",
            {
                "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
                "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
                "hidden_act": "silu", "attention_bias": True, "sliding_window": 128, "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "num_local_experts": 128, "num_experts_per_tok": 4,
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
                "tie_word_embeddings": False,
            },
        ),
        BenchGeometry(
            "deepseek-v3",
            {
                "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
                "moe_intermediate_size": 2048, "num_hidden_layers": 58, "first_k_dense_replace": 0,
                "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
                "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
                "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
                "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
                "topk_method": "noaux_tc", "hidden_act": "silu", "max_position_embeddings": 163840,
                "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
                "rope_scaling": {
                    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                },
            },
            note="58 layers with experts; the three dense layers before them are left out",
        ),
        BenchGeometry(
            "glm-5.2-dsa",
            {
                "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288,
                "moe_intermediate_size": 2048, "num_hidden_layers": 75, "first_k_dense_replace": 0,
                "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512,
                "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "index_n_heads": 32,
                "index_head_dim": 128, "index_topk": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
                "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
                "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
                "hidden_act": "silu", "max_position_embeddings": 202752, "rms_norm_eps": 1e-5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "tie_word_embeddings": False,
            },
            note="75 layers with experts, each with its own indexer; the three dense layers before them are left out",
        ),
        BenchGeometry(
            "glm-5.2",
            {
                "model_type": "qwen3_moe", "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288,
                "moe_intermediate_size": 2048, "num_hidden_layers": 76, "num_attention_heads": 64,
                "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "num_experts": 256, "num_experts_per_tok": 8,
                "norm_topk_prob": True, "tie_word_embeddings": False,
            },
            note="76 layers with experts; grouped attention of int8 weights stands in for MLA and the shared expert: "
            "114 MB a layer, as their int4 weights take",
        ),
    )
}  # fmt: skip


def geometry_named(name: str) -> BenchGeometry:
    """The geometry of that name; UsageError if there is none."""
    found = GEOMETRIES.get(name)
    if found is None:
        raise UsageError(f"--geometry {name!r} is not known", hint=f"Known: {', '.join(GEOMETRIES)}.")
    return found

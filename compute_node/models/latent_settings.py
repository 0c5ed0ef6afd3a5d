"""Sizes of multi-head latent attention and of the indexer that picks the positions it reads.

Source: DeepSeek-V2 and V3 reports, arXiv:2405.04434 and 2412.19437; DeepSeek-V3.2 report, arXiv:2512.02556.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["IndexerSettings", "LatentSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSettings:
    """Queries and keys of `plain` + `rotary` elements per head; keys and values are made from one latent per token.

    Attributes:
        query_rank: width of the compressed query (`q_lora_rank`), or None: queries are projected at once.
        rank: width of the latent that keys and values are made from (`kv_lora_rank`).
        plain: elements of a query head without position (`qk_nope_head_dim`).
        rotary: elements of a query head that are turned, and of the key that all heads share (`qk_rope_head_dim`).
        value: width of a value head (`v_head_dim`).
        scale: of the scores.
        norm_eps: of the norms of the compressed query and the latent.
    """

    query_rank: int | None
    rank: int
    plain: int
    rotary: int
    value: int
    scale: float
    norm_eps: float = 1e-6

    @property
    def width(self) -> int:
        """Floats that the cache holds per token and layer: the latent and the shared rotary key."""
        return self.rank + self.rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSettings:
    """Each row attends to the `top_k` positions with the largest index scores; equal scores go to the lower position.

    Attributes:
        heads: of the indexer (`index_n_heads`).
        head_dim: width of its queries and of its one key per position (`index_head_dim`); the first `rotary` elements
            are turned.
        top_k: positions that a row reads (`index_topk`).
        interleaved: layout of the indexer's rotary pairs.
        shared_layers: layers that read what the nearest lower layer with an indexer chose.
        norm_eps: of the layer norm of its keys.
    """

    heads: int
    head_dim: int
    top_k: int
    interleaved: bool
    shared_layers: frozenset[int] = frozenset()
    norm_eps: float = 1e-6

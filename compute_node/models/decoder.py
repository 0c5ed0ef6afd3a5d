"""Builds the program of a decoder step, block by block; a family's file says which blocks a layer has.

Activations live in a few float32 buffers that all layers share, `[rows, width]`. A program is cut into segments where
the engine must bring experts: a segment ends with a router, the next one begins by adding the experts' rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from compute_node import kernels
from compute_node.engine.kv_cache import KVCache
from compute_node.engine.program import Segment
from compute_node.engine.weights import Weights
from compute_node.kernels import Batch, Matrix, Op, QuantisedRows
from compute_node.models.decoder_config import DecoderConfig
from compute_node.models.look_ahead import LookAhead, RouterWeights

__all__ = ["DecoderBuilder", "DecoderProgram", "QueryKeyNorm", "build_program"]

F32 = NDArray[np.float32]


class QueryKeyNorm(Enum):
    """What is normalised between the query and key projections and the rotary embedding."""

    NONE = "none"
    FULL_WIDTH = "full width"
    PER_HEAD = "per head"


@dataclass(frozen=True, slots=True)
class DecoderProgram:
    """A step, ready to run, and the buffers through which the engine talks to it.

    Attributes:
        batch: live rows of a step.
        body: segments; after segment i the engine brings the experts of `expert_layers[i]`. One more than those.
        expert_layers: model layers with routed experts, rising.
        head: final norm and LM head over the rows that `head_index` names.
        head_batch: its live rows.
        head_index: int64 [head rows], rows of the step whose logits are wanted.
        logits: float32 [head rows, vocabulary].
        expert_input: float32 [rows, H], what the experts of the current layer are applied to.
        expert_quantised: the same as signed bytes, where experts want it.
        expert_rows: float32 [rows, top_k, H], one row per token and router rank.
        route_indices: int32 [rows, top_k], experts in router order.
        route_weights: float32 [rows, top_k].
        look_ahead: routers of layers to come, to be applied to the state of this one.
    """

    batch: Batch
    body: tuple[Segment, ...]
    expert_layers: tuple[int, ...]
    head: Segment
    head_batch: Batch
    head_index: NDArray[np.int64]
    logits: F32
    expert_input: F32
    expert_quantised: QuantisedRows | None
    expert_rows: F32
    route_indices: NDArray[np.int32]
    route_weights: F32
    look_ahead: LookAhead


class DecoderBuilder:
    """Appends ops to a program; blocks read and write the residual stream `x`.

    Args:
        config: sizes and switches of the model.
        weights: its dense tensors.
        cache: where keys and values of all sequences live.
        rows: most tokens of one step.
        head_rows: most rows of one step whose logits are computed together.
        numerics: name of the matrix kernels' arithmetic; routers are always computed exactly.
        quantised_experts: some layer's experts want their input as signed bytes.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        cache: KVCache,
        *,
        rows: int,
        head_rows: int,
        numerics: str,
        quantised_experts: bool = False,
    ) -> None:
        self.config = config
        self._weights = weights
        self._cache = cache
        self._numerics = numerics
        self._quantised_experts = quantised_experts
        self._quantised: dict[int, QuantisedRows] = {}
        self._current: set[int] = set()
        self._batch = Batch(rows)
        self._head_batch = Batch(head_rows)
        hidden, heads, kv_heads = config.hidden_size, config.heads, config.kv_heads

        def buffer(width: int, count: int = rows) -> F32:
            return np.zeros((count, width), np.float32)

        self._x = buffer(hidden)
        self._normed = buffer(hidden)
        self._query = buffer(heads * config.head_dim)
        self._key = buffer(kv_heads * config.head_dim)
        self._value = buffer(kv_heads * config.head_dim)
        self._attended = buffer(heads * config.head_dim)
        self._delta = buffer(hidden)
        self._gate = buffer(max(1, config.dense_width if config.dense_layers else 1))
        self._up = np.zeros_like(self._gate)
        self._router_logits = buffer(config.experts)
        self._route_indices = np.zeros((rows, config.top_k), np.int32)
        self._route_weights = buffer(config.top_k)
        self._expert_rows = np.zeros((rows, config.top_k, hidden), np.float32)
        self._head_index = np.zeros(head_rows, np.int64)
        self._head_x = buffer(hidden, head_rows)
        self._logits = buffer(config.vocab_size, head_rows)
        self._rope = kernels.rope_tables(cache.context, config.head_dim, config.rope_theta)
        self._ops: list[Op] = []
        self._segments: list[Segment] = []
        self._expert_layers: list[int] = []
        self._routers: dict[int, RouterWeights] = {}
        self._embedding: Matrix | None = None

    def embedding(self) -> None:
        """Sets x to rows of the embedding table."""
        config = self.config
        self._embedding = self._weights.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._ops.append(kernels.embed("embedding", self._embedding, self._x, self._batch))

    def attention(self, layer: int, *, norm: QueryKeyNorm) -> None:
        """Adds to x: o_proj(attention(rope(norm(q)), rope(norm(k)), v)) of the normed x."""
        config, batch, add = self.config, self._batch, self._ops.append
        prefix, label = f"model.layers.{layer}.self_attn", f"layer {layer}"
        query, key, value = self._query, self._key, self._value
        self._rms_norm(f"{label} input norm", f"model.layers.{layer}.input_layernorm.weight", self._x, self._normed)
        for name, y in (("q_proj", query), ("k_proj", key), ("v_proj", value)):
            self._project(f"{label} {name}", f"{prefix}.{name}", self._normed, y, bias=config.attention_bias)
        if norm is not QueryKeyNorm.NONE:
            for name, y in (("q_norm", query), ("k_norm", key)):
                width = y.shape[1] if norm is QueryKeyNorm.FULL_WIDTH else config.head_dim
                self._rms_norm(f"{label} {name}", f"{prefix}.{name}.weight", y, y, width=width)
        if config.clip_qkv is not None:
            for name, y in (("q", query), ("k", key), ("v", value)):
                add(kernels.clip(f"{label} clip {name}", y, config.clip_qkv, batch))
        cos, sin = self._rope
        for name, y in (("q", query), ("k", key)):
            add(kernels.rope(f"{label} rope {name}", y, cos, sin, batch, head_dim=config.head_dim))
        keys, values = self._cache.layer(layer)
        add(kernels.kv_append(f"{label} cache", key, value, keys, values, batch))
        scale = config.head_dim**-0.5
        add(
            kernels.attention(
                f"{label} attention", query, keys, values, self._attended, batch, scale=scale, window=config.window
            )
        )
        self._written(self._attended)
        self._project(f"{label} o_proj", f"{prefix}.o_proj", self._attended, self._delta, bias=config.attention_bias)
        add(kernels.add(f"{label} attention residual", self._x, self._delta, batch))

    def dense_mlp(self, layer: int) -> None:
        """Adds to x: down(silu(gate) * up) of the normed x."""
        prefix, label = f"model.layers.{layer}.mlp", f"layer {layer}"
        self._post_attention_norm(layer)
        self._project(f"{label} gate_proj", f"{prefix}.gate_proj", self._normed, self._gate)
        self._project(f"{label} up_proj", f"{prefix}.up_proj", self._normed, self._up)
        self._ops.append(kernels.silu_mul(f"{label} silu", self._gate, self._up, self._gate, self._batch))
        self._written(self._gate)
        self._project(f"{label} down_proj", f"{prefix}.down_proj", self._gate, self._delta)
        self._ops.append(kernels.add(f"{label} mlp residual", self._x, self._delta, self._batch))

    def routed_experts(self, layer: int, *, router: str) -> None:
        """Adds to x the sum, in router order, of weight times expert; ends the segment between router and sum.

        Args:
            layer: model layer.
            router: name of the router's weight, [experts, H].
        """
        config, batch, label = self.config, self._batch, f"layer {layer}"
        norm = self._post_attention_norm(layer)
        matrix = self._weights.matrix(router, config.experts, config.hidden_size)
        self._routers[layer] = RouterWeights(norm, matrix)
        self._ops += [
            kernels.matmul(f"{label} router", matrix, self._normed, self._router_logits, batch),
            kernels.router(
                f"{label} top-k",
                self._router_logits,
                self._route_indices,
                self._route_weights,
                batch,
                renormalise=config.renormalise,
            ),
        ]
        if self._quantised_experts:
            self._as_bytes(f"{label} expert input", self._normed, batch)
        self._end_segment(f"up to the router of layer {layer}")
        self._expert_layers.append(layer)
        self._ops.append(
            kernels.combine(f"{label} combine", self._x, self._expert_rows, self._route_weights, self._x, batch)
        )

    def finish(self) -> DecoderProgram:
        """The last segment, then final norm and LM head for chosen rows as a program of their own."""
        config = self.config
        self._end_segment("after the last experts")
        head, hidden = self._head_batch, config.hidden_size
        self._ops.append(kernels.gather_rows("rows for logits", self._x, self._head_index, self._head_x, head))
        norm = self._weights.vector("model.norm.weight", hidden)
        self._ops.append(kernels.rms_norm("final norm", self._head_x, norm, config.rms_norm_eps, self._head_x, head))
        self._written(self._head_x)
        matrix = self._embedding
        if matrix is None or not config.tied_embeddings:
            matrix = self._weights.matrix("lm_head.weight", config.vocab_size, hidden)
        self._matmul("lm_head", matrix, self._head_x, self._logits, head)
        body = tuple(self._segments)
        self._end_segment("logits")
        return DecoderProgram(
            batch=self._batch,
            body=body,
            expert_layers=tuple(self._expert_layers),
            head=self._segments[-1],
            head_batch=head,
            head_index=self._head_index,
            logits=self._logits,
            expert_input=self._normed,
            expert_quantised=self._quantised.get(id(self._normed)) if self._quantised_experts else None,
            expert_rows=self._expert_rows,
            route_indices=self._route_indices,
            route_weights=self._route_weights,
            look_ahead=LookAhead(self._routers, self._x, self._router_logits, config.rms_norm_eps),
        )

    def _post_attention_norm(self, layer: int) -> F32:
        name = f"model.layers.{layer}.post_attention_layernorm.weight"
        return self._rms_norm(f"layer {layer} post-attention norm", name, self._x, self._normed)

    def _rms_norm(self, label: str, name: str, x: F32, y: F32, width: int | None = None) -> F32:
        weight = self._weights.vector(name, x.shape[1] if width is None else width)
        self._ops.append(kernels.rms_norm(label, x, weight, self.config.rms_norm_eps, y, self._batch))
        self._written(y)
        return weight

    def _project(self, label: str, name: str, x: F32, y: F32, *, bias: bool = False) -> None:
        values = self._weights.vector(f"{name}.bias", y.shape[1]) if bias else None
        matrix = self._weights.matrix(f"{name}.weight", y.shape[1], x.shape[1])
        self._matmul(label, matrix, x, y, self._batch, bias=values)

    def _matmul(self, label: str, matrix: Matrix, x: F32, y: F32, batch: Batch, *, bias: F32 | None = None) -> None:
        quantised = None
        if kernels.quantises(self._numerics, matrix.format):
            quantised = self._as_bytes(f"{label} input", x, batch)
        self._ops.append(
            kernels.matmul(label, matrix, x, y, batch, bias=bias, numerics=self._numerics, quantised=quantised)
        )

    def _as_bytes(self, label: str, x: F32, batch: Batch) -> QuantisedRows:
        """The buffer as signed bytes; made by an op unless that happened since it was last written."""
        if id(x) not in self._quantised:
            self._quantised[id(x)] = QuantisedRows(*x.shape)
        rows = self._quantised[id(x)]
        if id(x) not in self._current:
            self._ops.append(kernels.quantise_rows(f"{label} as bytes", x, rows, batch))
            self._current.add(id(x))
        return rows

    def _written(self, x: F32) -> None:
        self._current.discard(id(x))

    def _end_segment(self, name: str) -> None:
        self._segments.append(Segment(name, self._ops))
        self._ops = []


def build_program(
    config: DecoderConfig,
    decoder_layer: Callable[[DecoderBuilder, int], None],
    weights: Weights,
    cache: KVCache,
    *,
    rows: int,
    head_rows: int,
    numerics: str = "exact",
    quantised_experts: bool = False,
) -> DecoderProgram:
    """The program of a family's step; raises UnsupportedModel if the store has tensors that no op uses."""
    build = DecoderBuilder(
        config,
        weights,
        cache,
        rows=rows,
        head_rows=head_rows,
        numerics=numerics,
        quantised_experts=quantised_experts,
    )
    build.embedding()
    for layer in range(config.layers):
        decoder_layer(build, layer)
    program = build.finish()
    weights.finish(unused_allowed={"lm_head.weight"} if config.tied_embeddings else set())
    return program

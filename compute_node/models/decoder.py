"""Builds the program of a decoder step: the buffers, weights and ops that the blocks of all families share.

Activations live in a few float32 buffers that all layers share, `[rows, width]`. A program is cut into segments where
the engine must bring experts: a segment ends with a router, the next one begins by adding the experts' rows. What a
layer consists of is said by a family's file, with the functions of `compute_node.models.blocks`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from compute_node import kernels
from compute_node.engine.kv_cache import KVCache
from compute_node.engine.weights import Weights
from compute_node.kernels import Batch, Matrix, Op, QuantisedRows, Segment
from compute_node.models.candidate_head import HeadWeights
from compute_node.models.decoder_config import DecoderConfig
from compute_node.models.decoder_program import DecoderProgram
from compute_node.models.look_ahead import LookAhead, RouterWeights
from compute_node.models.rope_settings import RopeSettings

__all__ = ["DecoderBuilder", "build_program"]

F32 = NDArray[np.float32]


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

    Attributes:
        config: as given.
        weights: as given.
        cache: as given.
        batch: live rows of a step.
        x: float32 [rows, H], the residual stream.
        normed: float32 [rows, H], x behind a norm: what a block's projections, routers and experts are applied to.
        delta: float32 [rows, H], what a block adds to x.
        always: float32 [rows, H], what a layer's shared expert gives, known before the routed ones; None: none so far.
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
        self.weights = weights
        self.cache = cache
        self.batch = Batch(rows)
        self._rows = rows
        self._numerics = numerics
        self._quantised_experts = quantised_experts
        self._buffers: dict[tuple[str, int], F32] = {}
        self._integers: dict[tuple[str, int], NDArray[np.int32]] = {}
        self._quantised: dict[int, QuantisedRows] = {}
        self._current: set[int] = set()
        self._tables: dict[RopeSettings, tuple[F32, F32]] = {}
        self._head_batch = Batch(head_rows)
        self.x = self.buffer("residual", config.hidden_size)
        self.normed = self.buffer("normed", config.hidden_size)
        self.delta = self.buffer("delta", config.hidden_size)
        self._router_logits = self.buffer("router logits", config.experts)
        self._route_indices = np.zeros((rows, config.top_k), np.int32)
        self._route_weights = self.buffer("route weights", config.top_k)
        self._expert_rows = np.zeros((rows, config.top_k, config.hidden_size), np.float32)
        self._head_index = np.zeros(head_rows, np.int64)
        self._head_x = np.zeros((head_rows, config.hidden_size), np.float32)
        self._logits = np.zeros((head_rows, config.vocab_size), np.float32)
        self._likeliest = np.zeros(head_rows, np.int64)
        self._ops: list[Op] = []
        self._segments: list[Segment] = []
        self._expert_layers: list[int] = []
        self._routers: dict[int, RouterWeights] = {}
        self._embedding: Matrix | None = None
        self.always: F32 | None = None

    def buffer(self, name: str, width: int) -> F32:
        """Activations float32 [rows, width], zero at first; the same array for the same name and width."""
        key = (name, width)
        if key not in self._buffers:
            self._buffers[key] = np.zeros((self._rows, width), np.float32)
        return self._buffers[key]

    def integers(self, name: str, width: int) -> NDArray[np.int32]:
        """The same for int32, such as numbers of positions."""
        key = (name, width)
        if key not in self._integers:
            self._integers[key] = np.zeros((self._rows, width), np.int32)
        return self._integers[key]

    def add(self, *ops: Op) -> None:
        """Appends ops to the segment that is being built."""
        self._ops += ops

    def written(self, x: F32) -> None:
        """An op that is not a norm has changed a buffer: what was made of it before is out of date."""
        self._current.discard(id(x))

    def rope_tables(self, settings: RopeSettings) -> tuple[F32, F32]:
        """Cosines and sines for all positions of the cache, float32 [context, rotary_dim / 2] each."""
        if settings not in self._tables:
            self._tables[settings] = settings.tables(self.cache.context)
        return self._tables[settings]

    def vector(self, name: str, length: int, *, centred: bool = False) -> F32:
        """A norm's weight or a bias, float32 [length]; one is added to a `centred` weight, stored less one."""
        stored = self.weights.vector(name, length)
        return stored + np.float32(1) if centred else stored

    def norm(
        self,
        label: str,
        name: str,
        x: F32,
        y: F32,
        *,
        width: int | None = None,
        eps: float | None = None,
        centred: bool = False,
    ) -> F32:
        """`y` = RMS norm of `x` times the weight `name`, which is returned.

        Args:
            label: name of the op.
            name: of the weight, without `.weight`.
            x: float32 [rows, n].
            y: the same shape; may be `x`.
            width: of the groups that are normalised on their own, such as a head; None: the whole row.
            eps: None: the config's.
            centred: the weight is stored less one.
        """
        weight = self.vector(f"{name}.weight", x.shape[1] if width is None else width, centred=centred)
        small = self.config.rms_norm_eps if eps is None else eps
        self.add(kernels.rms_norm(label, x, weight, small, y, self.batch))
        self.written(y)
        return weight

    def project(self, label: str, name: str, x: F32, y: F32, *, bias: bool = False) -> None:
        """`y` = x times the matrix `name`, plus its bias if it has one."""
        values = self.vector(f"{name}.bias", y.shape[1]) if bias else None
        self.matmul(label, self.weights.matrix(f"{name}.weight", y.shape[1], x.shape[1]), x, y, bias=values)

    def matmul(
        self, label: str, matrix: Matrix, x: F32, y: F32, *, bias: F32 | None = None, batch: Batch | None = None
    ) -> None:
        """`y` = x times the matrix, in the program's numerics, for the live rows of `batch` (None: of the step)."""
        batch = batch or self.batch
        quantised = None
        if kernels.quantises(self._numerics, matrix.format):
            quantised = self._as_bytes(f"{label} input", x, batch)
        self.add(kernels.matmul(label, matrix, x, y, batch, bias=bias, numerics=self._numerics, quantised=quantised))
        self.written(y)

    def embedding(self) -> None:
        """Sets x to rows of the embedding table."""
        config = self.config
        self._embedding = self.weights.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.add(kernels.embed("embedding", self._embedding, self.x, self.batch))

    def route(self, layer: int, router: RouterWeights, *, correction: F32 | None = None) -> None:
        """Chooses the experts of `normed`.

        Args:
            layer: model layer.
            router: its weights, and the norm before it.
            correction: float32 [experts], added to the scores for the choice alone.
        """
        label = f"layer {layer}"
        self._routers[layer] = router
        self.add(
            kernels.matmul(
                f"{label} router", router.router, self.normed, self._router_logits, self.batch, bias=router.bias
            ),
            kernels.router(
                f"{label} top-k",
                self._router_logits,
                self._route_indices,
                self._route_weights,
                self.batch,
                rule=self.config.routing,
                correction=correction,
            ),
        )

    def experts(self, layer: int) -> None:
        """Ends the segment, and begins the next one by adding to x the weighted sum of the chosen experts' rows."""
        label = f"layer {layer}"
        if self._quantised_experts:
            self._as_bytes(f"{label} expert input", self.normed, self.batch)
        self._end_segment(f"up to the router of layer {layer}")
        self._expert_layers.append(layer)
        self.add(
            kernels.combine(f"{label} combine", self.x, self._expert_rows, self._route_weights, self.x, self.batch)
        )

    def finish(self, *, centred: bool = False) -> DecoderProgram:
        """The last segment, then final norm and LM head for chosen rows as a program of their own.

        Args:
            centred: the weight of the final norm is stored less one.
        """
        config = self.config
        self._end_segment("after the last experts")
        head, hidden = self._head_batch, config.hidden_size
        self.add(kernels.gather_rows("rows for logits", self.x, self._head_index, self._head_x, head))
        norm = self.vector("model.norm.weight", hidden, centred=centred)
        self.add(kernels.rms_norm("final norm", self._head_x, norm, config.rms_norm_eps, self._head_x, head))
        self.written(self._head_x)
        matrix = self._embedding
        if matrix is None or not config.tied_embeddings:
            matrix = self.weights.matrix("lm_head.weight", config.vocab_size, hidden)
        self.matmul("lm_head", matrix, self._head_x, self._logits, batch=head)
        self.add(kernels.likeliest("likeliest token", self._logits, self._likeliest, head))
        body = tuple(self._segments)
        self._end_segment("logits")
        return DecoderProgram(
            batch=self.batch,
            body=body,
            expert_layers=tuple(self._expert_layers),
            head=self._segments[-1],
            head_batch=head,
            head_index=self._head_index,
            logits=self._logits,
            likeliest=self._likeliest,
            expert_input=self.normed,
            expert_quantised=self._quantised.get(id(self.normed)) if self._quantised_experts else None,
            expert_rows=self._expert_rows,
            route_indices=self._route_indices,
            route_weights=self._route_weights,
            look_ahead=LookAhead(
                self._routers,
                self.x,
                self._router_logits,
                config.rms_norm_eps,
                self.always,
                HeadWeights(norm, matrix),
            ),
        )

    def _as_bytes(self, label: str, x: F32, batch: Batch) -> QuantisedRows:
        """The buffer as signed bytes; made by an op unless that happened since it was last written."""
        if id(x) not in self._quantised:
            self._quantised[id(x)] = QuantisedRows(*x.shape)
        rows = self._quantised[id(x)]
        if id(x) not in self._current:
            self.add(kernels.quantise_rows(f"{label} as bytes", x, rows, batch))
            self._current.add(id(x))
        return rows

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
    program = build.finish(centred=config.centred_norms)
    weights.finish(unused_allowed={"lm_head.weight"} if config.tied_embeddings else set(), kept=config.kept)
    return program

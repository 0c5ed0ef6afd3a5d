"""The embedded model as a torch module: a small Qwen3-MoE.

The layout follows `Qwen3MoeForCausalLM` of transformers: RMS norms before attention and experts, grouped-query
attention with a norm per query and key head, rotary positions on the two halves of a head, and SwiGLU experts
behind a router whose top-k weights are renormalised (Qwen3 Technical Report, arXiv 2505.09388).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Model", "Shape"]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults are those of the embedded model.

    They make 28.9 M parameters, of which a token uses 6.9 M. `context` is the length of a training window,
    `positions` what the configuration promises: rotary positions carry on beyond the window.
    """

    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 32
    top_k: int = 4
    inner: int = 128
    context: int = 512
    positions: int = 2048
    rope_theta: float = 10_000.0
    eps: float = 1e-6


class Norm(nn.Module):
    """RMS norm over the last dimension (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., width]."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention with norms per head and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.query = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.key = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.value = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.output = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.query_norm = Norm(shape.head_dim, shape.eps)
        self.key_norm = Norm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend within [batch, length, hidden]; `cos` and `sin` are [length, head_dim]."""
        batch, length, _ = x.shape

        def heads(z: Tensor) -> Tensor:
            return z.view(batch, length, -1, self.shape.head_dim)

        def rotate(z: Tensor) -> Tensor:
            first, second = z.chunk(2, -1)
            return z * cos + torch.cat([-second, first], -1) * sin

        query = rotate(self.query_norm(heads(self.query(x))).transpose(1, 2))
        key = rotate(self.key_norm(heads(self.key(x))).transpose(1, 2))
        value = heads(self.value(x)).transpose(1, 2)
        group = self.shape.heads // self.shape.kv_heads
        mixed = functional.scaled_dot_product_attention(
            query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), is_causal=True
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, length, -1))


class Experts(nn.Module):
    """Router and routed SwiGLU experts; every expert runs once per step over the tokens sent to it.

    After a forward pass `balance` holds the load-balancing loss (Fedus et al., arXiv 2101.03961, eq. 4), `z` the
    router z-loss (Zoph et al., arXiv 2202.08906, eq. 5), `counts` [experts] how often each expert was chosen, and
    `chosen` [tokens, top_k] the experts in the router's order.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(shape.experts, 2 * shape.inner, shape.hidden) / math.sqrt(shape.hidden))
        depth = math.sqrt(2 * shape.layers)  # residual branches start small, by depth
        self.down = nn.Parameter(torch.randn(shape.experts, shape.hidden, shape.inner) / math.sqrt(shape.inner) / depth)
        self.balance = self.z = torch.zeros(())
        self.counts = torch.zeros(shape.experts, dtype=torch.int64)
        self.chosen = torch.zeros(0, shape.top_k, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        """The weighted sum of the chosen experts for [batch, length, hidden]."""
        flat = x.reshape(-1, self.shape.hidden)
        logits = self.router(flat).float()
        probabilities = logits.softmax(-1)
        weights, self.chosen = probabilities.topk(self.shape.top_k)
        weights = weights / weights.sum(-1, keepdim=True)

        assignments = self.chosen.reshape(-1)
        order = assignments.argsort(stable=True)
        token = order // self.shape.top_k
        self.counts = torch.bincount(assignments, minlength=self.shape.experts)
        results = []
        for expert, tokens in enumerate(flat[token].split(self.counts.tolist())):
            gate, up = functional.linear(tokens, self.gate_up[expert]).chunk(2, -1)
            results.append(functional.linear(functional.silu(gate) * up, self.down[expert]))
        weighted = torch.cat(results) * weights.reshape(-1)[order, None].to(flat.dtype)

        share = self.counts / len(assignments)
        self.balance = self.shape.experts * (share * probabilities.mean(0)).sum()
        self.z = (logits.logsumexp(-1) ** 2).mean()
        return torch.zeros_like(flat).index_add(0, token, weighted).reshape(x.shape)


class Block(nn.Module):
    """One layer: attention, then experts, each behind a norm and added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = Norm(shape.hidden, shape.eps)
        self.attention = Attention(shape)
        self.experts_norm = Norm(shape.hidden, shape.eps)
        self.experts = Experts(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [batch, length, hidden] to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.experts(self.experts_norm(x))


class Model(nn.Module):
    """The language model: token ids [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        nn.init.normal_(self.embedding.weight, 0, 0.02)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the token after each position."""
        size = self.shape.head_dim
        frequency = self.shape.rope_theta ** (-torch.arange(0, size, 2) / size)
        angle = torch.arange(ids.shape[1])[:, None] * frequency
        angle = torch.cat([angle, angle], -1)
        cos, sin = angle.cos(), angle.sin()
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    def routing_loss(self, balance: float, z: float) -> Tensor:
        """The two router losses of the last forward pass, averaged over layers and weighted."""
        terms = [balance * block.experts.balance + z * block.experts.z for block in self.blocks]
        return torch.stack(terms).mean()

"""From logits to a token: greedy, or a draw keyed by (seed, position) that is the same wherever it is computed.

The draw for a position never depends on the draws before it, so a conversation that is resumed, batched or speculated
on gets the same tokens. Everything is float64 in a fixed order; ties go to the lower token id.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from tierd.errors import TierdError, UsageError

if TYPE_CHECKING:
    from compute_node.kernels.draw import Draw

__all__ = ["Sampling", "choose_token"]

_MAX_SEED: Final = (1 << 64) - 1
_MOST_BIASED: Final = 1024
_LARGEST: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is chosen. The steps are applied in this order, as Hugging Face's `generate` does.

    Attributes:
        repetition_penalty: divides positive logits of tokens already seen and multiplies negative ones; 1: off.
        frequency_penalty: is subtracted from a token's logit for each time that it was generated; 0: off.
        presence_penalty: is subtracted once from the logit of each token that was generated; 0: off.
        logit_bias: pairs of a token id and what is added to its logit, each id once, at most 1024.
        temperature: divides the logits; 0: greedy.
        top_k: only the k likeliest; 0: off.
        top_p: the smallest set of likeliest tokens whose probability reaches p; 1: off.
        min_p: only tokens at least this fraction as likely as the likeliest; 0: off.
        seed: 0 to 2^64 - 1.
        greedy: the token is that with the largest of the logits as they are; follows from the others.

    Raises:
        UsageError: a value outside its range, naming the option.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    greedy: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ranges: tuple[tuple[str, float, float, float], ...] = (
            ("repetition_penalty", self.repetition_penalty, 0.01, 100.0),
            ("frequency_penalty", self.frequency_penalty, -100.0, 100.0),
            ("presence_penalty", self.presence_penalty, -100.0, 100.0),
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_k", self.top_k, 0, 1 << 24),
            ("top_p", self.top_p, 1e-9, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("seed", self.seed, 0, _MAX_SEED),
        )
        for name, value, low, high in ranges:
            if not low <= value <= high:
                raise UsageError(f"--{name.replace('_', '-')} {value} is outside {low} to {high}")
        if len(self.logit_bias) > _MOST_BIASED:
            raise UsageError(f"--logit-bias for {len(self.logit_bias)} tokens is more than {_MOST_BIASED}")
        for token, bias in self.logit_bias:
            if token < 0 or not -100.0 <= bias <= 100.0:
                raise UsageError(f"--logit-bias {bias} for token {token} is outside -100 to 100")
        object.__setattr__(self, "greedy", self.temperature == 0 and not self.adjusts)

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before temperature."""
        penalties = (self.repetition_penalty - 1.0, self.frequency_penalty, self.presence_penalty)
        return bool(self.logit_bias) or any(penalties)


def choose_token(
    logits: NDArray[np.float32],
    position: int,
    sampling: Sampling,
    *,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    allowed: NDArray[np.bool_] | None = None,
    forbidden: Collection[int] = (),
    likeliest: int | None = None,
) -> int:
    """The token at `position` of a sequence.

    Args:
        logits: float32 [vocabulary], or [1, vocabulary].
        position: of the token to be chosen, counted from the start of the sequence.
        sampling: how.
        prompt: tokens that were given, for the repetition penalty.
        generated: tokens chosen so far, for the penalties.
        allowed: bool [vocabulary], which tokens may be chosen; None: all.
        forbidden: tokens that may not be chosen.
        likeliest: token with the largest logit, the lowest of equals, or -1 if one is not finite; None: not known.

    Raises:
        TierdError: the logits are not numbers: weights or a kernel are broken; or no token may be chosen.
    """
    if likeliest is not None and likeliest >= 0 and sampling.greedy and allowed is None and not forbidden:
        return likeliest
    logits = logits.reshape(-1)
    if likeliest == -1 or (likeliest is None and not np.isfinite(logits).all()):
        raise TierdError(
            f"the logits of position {position} are not finite numbers",
            hint="Check the store with `tierd verify`.",
        )
    if sampling.adjusts:
        logits = _adjust(logits, sampling, prompt, generated)
    if allowed is not None or forbidden:
        logits = _restrict(logits, position, allowed, forbidden)
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    return _draw(logits, position, sampling)


def _adjust(
    logits: NDArray[np.float32], sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]
) -> NDArray[np.float32]:
    """Penalties and biases; each is applied once per token id, in float64, and rounded when all have been.

    What is too large for float32 then is the largest float32.
    """
    changed, penalty = logits.copy(), sampling.repetition_penalty
    seen: set[int] = set()
    if penalty != 1.0:
        # As in Keskar et al. 2019 (CTRL), however often a token was seen.
        seen = {*prompt, *generated}
        ids = np.fromiter(seen, np.int64, len(seen))
        chosen = logits[ids].astype(np.float64)
        changed[ids] = np.where(chosen > 0, chosen / penalty, chosen * penalty).clip(-_LARGEST, _LARGEST)
    less: dict[int, float] = {}
    if sampling.frequency_penalty or sampling.presence_penalty:
        frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
        less = {token: count * frequency + presence for token, count in Counter(generated).items()}
    more = dict(sampling.logit_bias)
    for token in less.keys() | more.keys():
        value = float(logits[token])
        if token in seen:
            value = value / penalty if value > 0 else value * penalty
        value = value - less.get(token, 0.0) + more.get(token, 0.0)
        changed[token] = min(max(value, -_LARGEST), _LARGEST)
    return changed


def _restrict(
    logits: NDArray[np.float32], position: int, allowed: NDArray[np.bool_] | None, forbidden: Collection[int]
) -> NDArray[np.float32]:
    """The logits of what may not be chosen become minus infinity."""
    kept = logits.copy() if allowed is None else np.where(allowed, logits, np.float32(-np.inf))
    if forbidden:
        kept[list(forbidden)] = -np.inf
    if kept.max() == -np.inf:
        raise TierdError(f"no token may be chosen at position {position}")
    return kept


class _Draws(threading.local):
    """What the thread draws with: scratch for the vocabulary that it drew from last."""

    ready: Draw | None = None


_DRAWS: Final = _Draws()


def _draw(logits: NDArray[np.float32], position: int, sampling: Sampling) -> int:
    draw = _DRAWS.ready
    if draw is None or draw.width != logits.size:
        # A node that never draws need not load it.
        from compute_node.kernels.draw import Draw  # noqa: PLC0415

        draw = _DRAWS.ready = Draw(logits.size)
    return draw(
        np.ascontiguousarray(logits),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        position=position,
    )

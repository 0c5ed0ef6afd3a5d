"""What all requests say about how to generate: fields, their limits, and the operator's defaults."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, ConfigDict, Field

from compute_node.engine.generate import GenerationParams
from compute_node.engine.sampler import Sampling
from compute_node.server.json_body import JsonFields
from compute_node.server.problem import Problem

__all__ = ["MAX_CHOICES", "Defaults", "SamplingFields"]

MAX_CHOICES: Final = 16
_MAX_STOPS: Final = 4
_MAX_BIASES: Final = 1024
_SEEDS: Final = 1 << 64
_LEAST_TOP_P: Final = 1e-9

Count = Annotated[int, Field(ge=0, le=1 << 31)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]


def _few_biases(given: Any) -> Any:
    """Refuses too many before each of them is looked at."""
    if isinstance(given, dict) and len(given) > _MAX_BIASES:
        raise ValueError(f"at most {_MAX_BIASES} tokens can be biased, not {len(given)}")
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What holds where a request says nothing.

    Attributes:
        sampling: the operator's.
        max_tokens: most tokens of an answer; None: as many as fit.
        answer_seconds: the longest that an answer may take.
    """

    sampling: Sampling
    max_tokens: int | None
    answer_seconds: float


class SamplingFields(JsonFields):
    """Fields that chat and completion requests share. Unknown fields are ignored, as OpenAI's servers do."""

    model_config = ConfigDict(allow_inf_nan=False, protected_namespaces=())

    model: Annotated[str, Field(max_length=256)] = ""
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 24)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=_MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64, fail_fast=True)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool = False
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(max_length=16)], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=_MAX_BIASES),
            BeforeValidator(_few_biases),
        ]
        | None
    ) = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        """How many answers are wanted."""
        return self.n or 1

    def params(
        self, defaults: Defaults, *, max_tokens: int | None, room: int, vocabulary: int
    ) -> tuple[GenerationParams, ...]:
        """What to generate, one for each choice; their seeds follow each other.

        Args:
            defaults: the operator's.
            max_tokens: as asked for; None: the operator's bound.
            room: tokens that fit the context after the prompt.
            vocabulary: number of token ids.

        Raises:
            Problem: a token id that is none.
        """
        asked = defaults.max_tokens if max_tokens is None else max_tokens
        seed = secrets.randbits(63) if self.seed is None else self.seed % _SEEDS
        return tuple(
            GenerationParams(
                max_tokens=max(0, room if asked is None else min(asked, room)),
                sampling=self._sampling(defaults.sampling, (seed + index) % _SEEDS, vocabulary),
                stop=self.stops,
                ignore_eos=self.ignore_eos,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                min_tokens=self.min_tokens or 0,
            )
            for index in range(self.choices)
        )

    def _sampling(self, base: Sampling, seed: int, vocabulary: int) -> Sampling:
        top_p = _or(self.top_p, base.top_p)
        return Sampling(
            repetition_penalty=_or(self.repetition_penalty, base.repetition_penalty),
            frequency_penalty=_or(self.frequency_penalty, base.frequency_penalty),
            presence_penalty=_or(self.presence_penalty, base.presence_penalty),
            logit_bias=self._biases(vocabulary),
            temperature=_or(self.temperature, base.temperature),
            top_k=max(0, _or(self.top_k, base.top_k)),
            top_p=max(_LEAST_TOP_P, top_p),
            min_p=_or(self.min_p, base.min_p),
            seed=seed,
        )

    def _biases(self, vocabulary: int) -> tuple[tuple[int, float], ...]:
        biases: dict[int, float] = {}
        for name, bias in (self.logit_bias or {}).items():
            token = int(name) if name.isascii() and name.isdigit() else vocabulary
            if token >= vocabulary:
                raise Problem(400, f"logit_bias: {name!r} is not a token id below {vocabulary}", param="logit_bias")
            biases[token] = bias
        return tuple(biases.items())


def _or(given: Any, default: Any) -> Any:
    return default if given is None else given

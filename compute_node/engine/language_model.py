"""What `Generator`, the serving engine and the commands need of a model, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tierd.client.source import ExpertSource, Phase

__all__ = ["LanguageModel", "ModelFacts", "PlaceCounts", "SequencePlaces", "StepTimesView"]


class ModelFacts(Protocol):
    """What a model's config says of it."""

    @property
    def family(self) -> str:
        """Its name for people."""

    @property
    def layers(self) -> int:
        """Of the decoder."""

    @property
    def experts(self) -> int:
        """Routed experts of a layer."""

    @property
    def top_k(self) -> int:
        """Experts of a token."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""

    @property
    def tied_embeddings(self) -> bool:
        """The embedding is the LM head as well."""


class PlaceCounts(Protocol):
    """How much room there is, in pages of 64 tokens."""

    @property
    def pages(self) -> int:
        """Of all sequences."""

    @property
    def available(self) -> int:
        """That no sequence holds."""

    @property
    def kept(self) -> int:
        """Of these, those that keep a prefix."""


class SequencePlaces(Protocol):
    """Where sequences are kept; what a sequence is, is the model's own affair, but it has `tokens`."""

    @property
    def sequences(self) -> int:
        """How many can be open at once."""

    @property
    def pool(self) -> PlaceCounts:
        """How much room there is."""

    def begin(self, tokens: Listing[int], *, reuse: bool = True) -> Any | None:
        """A sequence with room for these tokens, some of which it may have already; None if there is no room now."""

    def reserve(self, sequence: Any, count: int) -> bool:
        """Room for so many more tokens; False, and no change, if there is too little."""

    def advance(self, sequence: Any, tokens: Listing[int]) -> None:
        """These tokens of the sequence have been computed: a step succeeded."""

    def take(self) -> Any:
        """A place for a new sequence."""

    def keep_prefix(self, sequence: Any, tokens: Listing[int]) -> int:
        """Forget all but what a sequence has in common with `tokens`; returns how many tokens that is."""

    def give_back(self, sequence: Any) -> None:
        """The sequence is not needed any more."""


class StepTimesView(Protocol):
    """Where the time of all steps went; see `compute_node.engine.step_times.StepTimes`."""

    steps: int
    seconds: float
    wait_seconds: float

    @property
    def compute_seconds(self) -> float:
        """Time in steps that was not spent waiting for experts."""


class LanguageModel(Protocol):
    """From tokens to logits, one step at a time; see `compute_node.engine.model.Model`.

    Attributes:
        source: brings the experts.
        numerics: name of the arithmetic.
        rows: most tokens of one step.
        likeliest: of each row of logits of the last step the token with the largest one, -1 if one is not finite;
            empty where the model does not say.
    """

    source: ExpertSource
    numerics: str
    rows: int
    likeliest: list[int]

    @property
    def config(self) -> ModelFacts:
        """What the model is."""

    @property
    def times(self) -> StepTimesView:
        """Of all steps so far."""

    @property
    def cache(self) -> SequencePlaces:
        """Places of sequences."""

    @property
    def threads(self) -> int:
        """Threads that compute."""

    @property
    def context(self) -> int:
        """Most tokens of a sequence."""

    @property
    def experts_chosen(self) -> int:
        """Unique experts that the router chose, summed over layers and steps; counted by the node."""

    def extend(
        self,
        sequence: Any,
        tokens: list[int],
        *,
        phase: Phase,
        logits_of: Listing[int] = (-1,),
        cancelled: Callable[[], bool] | None = None,
        observe: Callable[[int, NDArray[np.int32], NDArray[np.float32]], None] | None = None,
        keep: bool = True,
    ) -> NDArray[np.float32] | None:
        """Logits of tokens that continue a sequence; None if that was cancelled. Without `keep` until the next step."""

    def forward(
        self,
        tokens: Listing[int],
        positions: Listing[int],
        sequences: Listing[Any],
        *,
        phase: Phase,
        logits_of: Listing[int],
        cancelled: Callable[[], bool] | None = None,
        unwanted: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.float32] | None:
        """One step over rows of several sequences; see `compute_node.engine.model.Model.forward`.

        The logits stand until the next step.
        """

    def close(self) -> None:
        """Gives back what it holds but the source."""

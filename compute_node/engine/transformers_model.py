"""The engine for architectures without a native program: the authors' own code, in transformers, with tierd's experts.

torch's kernels give torch's bits: the tokens are those of the unmodified model at the same type, and how a prompt was
cut into steps may change the last bits of its logits. Imported only where it is wanted: it needs the extra `torch`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from compute_node.engine.model import DEFAULT_CONTEXT
from compute_node.engine.step_times import StepTimes
from tierd.client.source import ExpertSource, Phase
from tierd.errors import LimitExceeded, UsageError
from tierd.integrations.transformers.caching import cache_of, with_cache
from tierd.integrations.transformers.experts import StepCancelled
from tierd.integrations.transformers.loading import load_from, resolve_dtype
from tierd.sizes import parse_bytes

__all__ = ["TransformersConfig", "TransformersModel", "TransformersOptions"]

_ROWS: Final = 512
"""Most tokens of one step."""
_NEVER: Final = -1e30
"""Logit of a token that a model gives none: finite, as all logits have to be, and its probability is 0."""
_PAGE: Final = 64
"""Tokens of a page, in which room is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersOptions:
    """How the model is run.

    Attributes:
        device: that computes: `cpu`, `cuda`, `cuda:1`.
        vram: most bytes of experts kept on the device; None keeps none.
        context: most tokens of a sequence; None: what the checkpoint was made for, at most `DEFAULT_CONTEXT`.
        sequences: how many can be open at once.
        threads: of torch; None: torch's own choice.
        prefetch: tell the daemon which experts the next layer will probably want.
    """

    device: str = "cpu"
    vram: str | None = None
    context: int | None = None
    sequences: int = 1
    threads: int | None = None
    prefetch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """What config.json says, as far as commands want to know it."""

    family: str
    layers: int
    experts: int
    top_k: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tied_embeddings: bool
    max_positions: int


@dataclass(slots=True, eq=False)
class TorchSequence:
    """Tokens of one sequence, and what the model has kept of the first of them.

    Attributes:
        tokens: all of them.
        past: the model's own cache; None: nothing.
        computed: how many tokens it covers.
    """

    tokens: list[int] = field(default_factory=list)
    past: Any = None
    computed: int = 0

    def forget(self) -> None:
        """The cache cannot be trusted any more; its tokens will be computed again."""
        self.past, self.computed = None, 0

    def cut(self, length: int) -> bool:
        """Makes the cache cover these first tokens at most; False if it had to be given up for that."""
        if self.computed <= length:
            return True
        layers = getattr(self.past, "layers", None)
        if not length or not layers or any(type(layer).__name__ != "DynamicLayer" for layer in layers):
            # It keeps more than keys and values of each token: windows, or states that cannot go back.
            self.forget()
            return False
        self.past.crop(length)
        self.computed = length
        return True


@dataclass(slots=True)
class TorchPlaces:
    """How much room there is: each sequence has a place for a whole context, so pages are never short."""

    places: int
    context: int
    open: int = 0

    @property
    def pages(self) -> int:
        """Of all sequences."""
        return self.places * -(-self.context // _PAGE)

    @property
    def available(self) -> int:
        """That no sequence holds."""
        return (self.places - self.open) * -(-self.context // _PAGE)

    @property
    def kept(self) -> int:
        """None of the free ones keeps a prefix."""
        return 0


class TorchSequences:
    """Places of sequences: each has a cache of its own, made by the model's code.

    Args:
        sequences: how many may be open at once.
        context: most tokens of each.
    """

    def __init__(self, sequences: int, context: int) -> None:
        self.sequences = sequences
        self.pool = TorchPlaces(sequences, context)

    def take(self) -> TorchSequence:
        """A new, empty sequence; LimitExceeded if all are taken."""
        if self.pool.open >= self.sequences:
            raise LimitExceeded("all sequences of the KV cache are in use")
        self.pool.open += 1
        return TorchSequence()

    def begin(self, tokens: Listing[int], *, reuse: bool = True) -> TorchSequence | None:
        """A new sequence; None if all are taken. No prefix is taken over from others."""
        del tokens, reuse
        return self.take() if self.pool.open < self.sequences else None

    def reserve(self, sequence: TorchSequence, count: int) -> bool:
        """There is always room for a whole context."""
        del sequence, count
        return True

    def advance(self, sequence: TorchSequence, tokens: Listing[int]) -> None:
        """These tokens of the sequence have been computed: a step succeeded."""
        sequence.tokens.extend(tokens)

    def give_back(self, sequence: TorchSequence) -> None:
        """Frees the memory of a sequence."""
        sequence.tokens.clear()
        sequence.forget()
        self.pool.open -= 1

    def keep_prefix(self, sequence: TorchSequence, tokens: Listing[int]) -> int:
        """Forgets all but what is common; a cache that cannot be cut is given up, if it holds more than that."""
        common = 0
        for own, other in zip(sequence.tokens, tokens, strict=False):
            if own != other:
                break
            common += 1
        if not sequence.cut(common):
            common = 0
        del sequence.tokens[common:]
        return common


class TransformersModel:
    """A model of transformers on an open source; the surface is that of `compute_node.engine.model.Model`.

    Args:
        source: brings experts; not closed with the model.
        options: how to run.

    Attributes:
        source: as given.
        model: of transformers.
        config: what it is.
        times: where the time of all steps went.
        cache: places of sequences.
        rows: most tokens of one step.
        numerics: name of the arithmetic.

    Raises:
        UnsupportedModel: transformers does not know the architecture, or cannot be given its experts.
        UsageError: options outside their limits, or a device that is not there.
    """

    def __init__(self, source: ExpertSource, options: TransformersOptions) -> None:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        dtype = resolve_dtype(None, source)
        self.source = source
        self.model = load_from(
            source,
            device=_device(options.device),
            dtype=dtype,
            vram=None if options.vram is None else parse_bytes(options.vram, option="--vram"),
            prefetch=options.prefetch,
            owns_source=False,
        )
        self.config = _config(self.model, source)
        context = min(self.config.max_positions, DEFAULT_CONTEXT) if options.context is None else options.context
        if not 1 <= context <= self.config.max_positions:
            raise UsageError(
                f"--context {context} is outside 1 to {self.config.max_positions}, the context of this checkpoint"
            )
        self.context = context
        self.rows = min(_ROWS, context)
        self.numerics = f"torch {str(dtype).removeprefix('torch.')}"
        self.times = StepTimes()
        self.likeliest: list[int] = []
        self.cache = TorchSequences(options.sequences, context)
        self._runtime = self.model.tierd.runtime
        self._cuts_logits = "logits_to_keep" in inspect.signature(self.model.forward).parameters

    @property
    def threads(self) -> int:
        """Threads that compute on the CPU."""
        return int(torch.get_num_threads())

    @property
    def experts_chosen(self) -> int:
        """Unique experts that routers chose, summed over layers and steps."""
        return int(self._runtime.experts_chosen)

    def close(self) -> None:
        """Gives back what is on the device."""
        self.model.tierd.release()

    def extend(
        self,
        sequence: TorchSequence,
        tokens: list[int],
        *,
        phase: Phase,
        logits_of: Listing[int] = (-1,),
        cancelled: Callable[[], bool] | None = None,
        observe: Callable[[int, NDArray[np.int32], NDArray[np.float32]], None] | None = None,
        keep: bool = True,
    ) -> NDArray[np.float32] | None:
        """Computes `tokens` as the continuation of a sequence, in one step; see `Model.extend`.

        A step that is cancelled or fails leaves the sequence's tokens as they were; if its cache did not survive
        that, they are computed again with the next step.

        Raises:
            LimitExceeded: a token id outside the vocabulary, too many tokens, or a full context.
            UsageError: routes are wanted (`observe`), which are the model's own affair here.
            TierdError: of the expert source.
        """
        del keep  # they are nobody else's
        if observe is not None:
            raise UsageError("routes are not recorded with --engine transformers", hint="Leave --trace out.")
        if not 0 < len(tokens) <= self.rows:
            raise LimitExceeded(f"a step of {len(tokens)} tokens is outside 1 to {self.rows}")
        start = len(sequence.tokens)
        if start + len(tokens) > self.context:
            raise LimitExceeded(f"{start + len(tokens)} tokens do not fit the context of {self.context}")
        logits = self.forward(
            tokens,
            range(start, start + len(tokens)),
            [sequence] * len(tokens),
            phase=phase,
            logits_of=[place % len(tokens) for place in logits_of],
            cancelled=cancelled,
        )
        if logits is not None:
            sequence.tokens += tokens
        return logits

    def forward(
        self,
        tokens: Listing[int],
        positions: Listing[int],
        sequences: Listing[TorchSequence],
        *,
        phase: Phase,
        logits_of: Listing[int],
        cancelled: Callable[[], bool] | None = None,
        unwanted: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.float32] | None:
        """One step over rows of several sequences, one sequence after the other; see `Model.forward`."""
        del positions, phase  # both are seen from the sequences
        if min(tokens) < 0 or max(tokens) >= self.config.vocab_size:
            raise LimitExceeded(f"a token id is outside the vocabulary of {self.config.vocab_size} tokens")
        begun, waited = time.perf_counter(), self.source.stats.wait_seconds
        # Some models give no logits for the end of a padded vocabulary: such tokens are never chosen.
        logits = np.full((len(logits_of), self.config.vocab_size), _NEVER, np.float32)
        try:
            for first, end in _runs(sequences):
                if cancelled is not None and cancelled():
                    return None
                wanted = [(row, place - first) for row, place in enumerate(logits_of) if first <= place < end]
                if unwanted is not None and unwanted[first:end].all():
                    continue
                found = self._compute(sequences[first], list(tokens[first:end]), [at for _, at in wanted], cancelled)
                logits[[row for row, _ in wanted], : found.shape[1]] = found
        except StepCancelled:
            return None
        finally:
            self._runtime.cancelled = None
            self.times.steps += 1
            self.times.seconds += time.perf_counter() - begun
            self.times.wait_seconds += self.source.stats.wait_seconds - waited
        return logits

    def _compute(
        self, sequence: TorchSequence, tokens: list[int], places: list[int], cancelled: Callable[[], bool] | None
    ) -> NDArray[np.float32]:
        """Logits of those places of `tokens`, which continue the sequence; afterwards its cache covers them, too."""
        sequence.cut(len(sequence.tokens))
        fresh = sequence.tokens[sequence.computed :] + tokens
        options = with_cache(self.model, sequence.past)
        if self._cuts_logits and places in ([], [len(tokens) - 1]):
            options["logits_to_keep"] = 1
        self._runtime.cancelled = cancelled
        try:
            with torch.inference_mode():
                ids = torch.tensor([fresh], dtype=torch.long, device=self.model.device)
                answer = self.model(input_ids=ids, **options)
        except BaseException:
            sequence.forget()
            raise
        sequence.past = cache_of(answer)
        sequence.computed = 0 if sequence.past is None else len(sequence.tokens) + len(tokens)
        missing = len(fresh) - answer.logits.shape[1]
        rows = [len(fresh) - len(tokens) + place - missing for place in places]
        found: NDArray[np.float32] = answer.logits[0, rows, : self.config.vocab_size].float().cpu().numpy()
        return found


def _runs(sequences: Listing[TorchSequence]) -> list[tuple[int, int]]:
    """First and end of the rows of each sequence."""
    starts = [at for at in range(len(sequences)) if at == 0 or sequences[at] is not sequences[at - 1]]
    return list(zip(starts, [*starts[1:], len(sequences)], strict=True))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name!r} is not known", hint="Give cpu, cuda, or cuda:NUMBER.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here")
    return device


def _config(model: Any, source: ExpertSource) -> TransformersConfig:
    text = model.config.get_text_config(decoder=True)
    geometry = source.store.manifest.geometry
    ends = next(
        (end for each in (text, model.config) if (end := getattr(each, "eos_token_id", None)) is not None), None
    )
    many = ends if isinstance(ends, list | tuple) else [ends]
    return TransformersConfig(
        family=str(model.config.model_type),
        layers=int(text.num_hidden_layers),
        experts=max(entry.experts for entry in geometry.layers),
        top_k=geometry.top_k,
        vocab_size=int(text.vocab_size),
        eos_token_ids=tuple(token for token in many if isinstance(token, int)),
        tied_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        max_positions=int(getattr(text, "max_position_embeddings", None) or 1 << 24),
    )

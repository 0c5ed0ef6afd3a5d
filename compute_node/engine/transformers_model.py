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

from compute_node.engine.model import DEFAULT_CONTEXT, StepTimes
from tierd.client.source import ExpertSource, Phase
from tierd.errors import LimitExceeded, UsageError
from tierd.integrations.transformers.experts import StepCancelled
from tierd.integrations.transformers.loading import load_from, resolve_dtype
from tierd.sizes import parse_bytes

__all__ = ["TransformersConfig", "TransformersModel", "TransformersOptions"]

_ROWS: Final = 512
"""Most tokens of one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersOptions:
    """How the model is run.

    Attributes:
        device: that computes: `cpu`, `cuda`, `cuda:1`.
        vram: most bytes of experts kept on the device; None keeps none.
        context: most tokens of a sequence; None: what the checkpoint was made for, at most `DEFAULT_CONTEXT`.
        threads: of torch; None: torch's own choice.
        prefetch: tell the daemon which experts the next layer will probably want.
    """

    device: str = "cpu"
    vram: str | None = None
    context: int | None = None
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


class TorchSequences:
    """Places of sequences: each has a cache of its own, made by the model's code."""

    def take(self) -> TorchSequence:
        """A new, empty sequence."""
        return TorchSequence()

    def give_back(self, sequence: TorchSequence) -> None:
        """Frees the memory of a sequence."""
        sequence.tokens.clear()
        sequence.forget()

    def keep_prefix(self, sequence: TorchSequence, tokens: Listing[int]) -> int:
        """Forget all but what is common; a cache that cannot be cut is given up, since it holds more than that."""
        common = 0
        for own, other in zip(sequence.tokens, tokens, strict=False):
            if own != other:
                break
            common += 1
        if common < sequence.computed:
            if not _crop(sequence.past, common):
                sequence.forget()
                common = 0
            sequence.computed = min(sequence.computed, common)
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
        self.cache = TorchSequences()
        self._runtime = self.model.tierd.runtime
        self._cuts_logits = "logits_to_keep" in inspect.signature(self.model.forward).parameters

    @property
    def threads(self) -> int:
        """Threads that compute on the CPU."""
        return torch.get_num_threads()

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
    ) -> NDArray[np.float32] | None:
        """Computes `tokens` as the continuation of a sequence, in one step; see `Model.extend`.

        A step that is cancelled or fails leaves the sequence's tokens as they were; they are computed again with the
        next step.

        Raises:
            LimitExceeded: a token id outside the vocabulary, too many tokens, or a full context.
            UsageError: routes are wanted (`observe`), which are the model's own affair here.
            TierdError: of the expert source.
        """
        del phase  # seen from the number of tokens
        if observe is not None:
            raise UsageError("routes are not recorded with --engine transformers", hint="Leave --trace out.")
        self._check(sequence, tokens)
        begun, waited = time.perf_counter(), self.source.stats.wait_seconds
        try:
            logits = self._forward(sequence, tokens, [place % len(tokens) for place in logits_of], cancelled)
        except StepCancelled:
            sequence.forget()
            return None
        except BaseException:
            sequence.forget()
            raise
        finally:
            self._runtime.cancelled = None
            self.times.steps += 1
            self.times.seconds += time.perf_counter() - begun
            self.times.wait_seconds += self.source.stats.wait_seconds - waited
        sequence.tokens += tokens
        sequence.computed = len(sequence.tokens)
        return logits

    def _check(self, sequence: TorchSequence, tokens: list[int]) -> None:
        if not 0 < len(tokens) <= self.rows:
            raise LimitExceeded(f"a step of {len(tokens)} tokens is outside 1 to {self.rows}")
        if len(sequence.tokens) + len(tokens) > self.context:
            raise LimitExceeded(f"{len(sequence.tokens) + len(tokens)} tokens do not fit the context of {self.context}")
        for token in tokens:
            if not 0 <= token < self.config.vocab_size:
                raise LimitExceeded(f"token id {token} is outside the vocabulary of {self.config.vocab_size} tokens")

    def _forward(
        self, sequence: TorchSequence, tokens: list[int], places: list[int], cancelled: Callable[[], bool] | None
    ) -> NDArray[np.float32] | None:
        if cancelled is not None and cancelled():
            return None
        fresh = sequence.tokens[sequence.computed :] + tokens
        options: dict[str, Any] = {"use_cache": True}
        if sequence.past is not None:
            options["past_key_values"] = sequence.past
        last = places in ([], [len(tokens) - 1])
        if last and self._cuts_logits:
            options["logits_to_keep"] = 1
        self._runtime.cancelled = cancelled
        with torch.inference_mode():
            ids = torch.tensor([fresh], dtype=torch.long, device=self.model.device)
            answer = self.model(input_ids=ids, **options)
        past = getattr(answer, "past_key_values", None)
        sequence.past = past if past is not None else getattr(answer, "cache", None)
        behind = len(fresh) - answer.logits.shape[1]
        rows = [len(fresh) - len(tokens) + place - behind for place in places]
        return answer.logits[0, rows].float().cpu().numpy()  # type: ignore[no-any-return]


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
    ends = text.eos_token_id if text.eos_token_id is not None else model.config.eos_token_id
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


def _crop(past: Any, length: int) -> bool:
    """Cuts a cache to its first tokens; False where it keeps more than keys and values of each token."""
    layers = getattr(past, "layers", None)
    if not layers or any(type(layer).__name__ != "DynamicLayer" for layer in layers):
        return False
    past.crop(length)
    return True

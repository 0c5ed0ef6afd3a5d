"""A loaded model: from token ids at given positions to logits, one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing
from time import perf_counter
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.cache_budget import pages_of
from compute_node.engine.cancel import CancelWord
from compute_node.engine.executor import Executor
from compute_node.engine.expert_step import ExpertPoint
from compute_node.engine.head_rows import HeadRows
from compute_node.engine.kv_cache import KVCache, Sequence
from compute_node.engine.model_options import DEFAULT_CONTEXT, EXECUTIONS, ModelOptions
from compute_node.engine.step import StepRunner
from compute_node.engine.step_times import StepTimes
from compute_node.engine.weights import Weights
from compute_node.kernels import quantises
from compute_node.kernels.pages import PAGE
from compute_node.models.config_reader import parse_config
from compute_node.models.decoder import build_program
from compute_node.models.decoder_config import check_geometry
from compute_node.models.decoder_program import DecoderProgram
from compute_node.models.registry import family_of
from compute_node.prediction.foresight import Foresight
from compute_node.prediction.hinting import StepHints
from compute_node.prediction.step_hints import step_hints
from tierd.client.source import ExpertSource, Phase
from tierd.errors import LimitExceeded
from tierd.policy.token_table import TokenTable

__all__ = ["DEFAULT_CONTEXT", "EXECUTIONS", "Cancelled", "Model", "ModelOptions", "Observe"]

Cancelled = Callable[[], bool]
Observe = Callable[[int, NDArray[np.int32], NDArray[np.float32]], None]


class Model:
    """Dense weights, KV cache, program and executor of one model; the experts come from a source.

    Synchronous, for one thread at a time. The source is not closed with it.

    Args:
        source: brings experts and shows the store's files and dense weights.
        options: how to run.
        adapt: changes the program before it is run; measurements force routes by it.

    Attributes:
        likeliest: of each row of logits of the last step the token with the largest one, -1 if one is not finite.

    Raises:
        UnsupportedModel: an unknown family, or a setting or tensor whose meaning is not known.
        StoreDamaged: config, geometry and tensors do not belong together.
        UsageError: options outside their limits.
    """

    def __init__(
        self,
        source: ExpertSource,
        options: ModelOptions | None = None,
        *,
        adapt: Callable[[DecoderProgram], DecoderProgram] = lambda program: program,
    ) -> None:
        options = options or ModelOptions()
        self.source = source
        family, config = family_of(parse_config(source.store.read_file("config.json")))
        geometry = source.store.manifest.geometry
        check_geometry(config, geometry)
        context, numerics = options.context_of(config.max_positions), options.numerics
        self.config = config
        self.model_type = family.model_type
        self.numerics = numerics
        self.times = StepTimes()
        self.likeliest: list[int] = []
        layout = family.cache_layout(config)
        pages = pages_of(layout, context=context, sequences=options.sequences, budget=options.kv_cache)
        self.cache = KVCache(layout, pages=pages, sequences=options.sequences, context=context)
        self.rows = min(options.rows, self.cache.context * options.sequences)
        weights = Weights(source.store)
        program = build_program(
            config,
            family.decoder_layer,
            weights,
            self.cache,
            rows=self.rows,
            head_rows=min(options.head_rows, self.rows),
            numerics=numerics,
            quantised_experts=any(quantises(numerics, layout.format) for layout in geometry.layouts),
        )
        self._program = adapt(program)
        self._batch = program.batch
        self._vocabulary = config.vocab_size
        self.dense_bytes = weights.nbytes
        self._executor = Executor(options.threads)
        self._head = HeadRows(self._program, self._executor)
        self._likeliest, self._one_row = self._program.likeliest.data, self._program.logits[:1]
        self._foresight = Foresight(geometry)
        self.hinting: StepHints | None = step_hints(
            options.prefetch, source, geometry, self._program.look_ahead, self._executor.run, self._foresight.table
        )
        self._experts = ExpertPoint(
            source, geometry, self._program, self._executor, numerics=numerics, by_ops=options.execution == "ops"
        )
        self._steps = StepRunner(source, geometry, self._program, self._executor, options, recurrent=layout.recurrent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def threads(self) -> int:
        """Native threads that compute."""
        return int(self._executor.threads)

    @property
    def native_seconds(self) -> float:
        """Time spent in native code, over all steps."""
        return self._executor.native_seconds

    @property
    def context(self) -> int:
        """Most tokens of a sequence."""
        return self.cache.context

    @property
    def token_table(self) -> TokenTable:
        """What was learned of tokens and the experts that go with them; it changes speed only."""
        return self._foresight.table

    @property
    def experts_chosen(self) -> int:
        """Unique experts that the router chose, summed over layers and steps; counted here, not by the source."""
        return self._experts.experts_chosen + self._steps.experts_used

    def watch(self, told: Callable[[str, float, float], object]) -> None:
        """Let somebody know of each piece of native code that runs; see `Executor.watch`."""
        self._executor.watch = told

    @property
    def program(self) -> DecoderProgram:
        """The step as ops, and the buffers that it leaves behind."""
        return self._program

    def route_ahead(self, layer: int, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits of a layer's router on residual states of another: float32 [rows, H] to float32 [rows, experts].

        There are at most `LOOK_AHEAD_ROWS` rows. Nothing of a step changes.
        """
        look = self._program.look_ahead
        look.batch.set_rows(len(states))
        look.state[: len(states)] = states
        self._executor.run(look.segment(layer))
        return look.logits[: len(states)].copy()

    def close(self) -> None:
        """Ends the native threads. May be called more than once."""
        self._executor.close()

    def extend(
        self,
        sequence: Sequence,
        tokens: list[int],
        *,
        phase: Phase,
        logits_of: Listing[int] = (-1,),
        cancelled: Cancelled | None = None,
        observe: Observe | None = None,
        keep: bool = True,
    ) -> NDArray[np.float32] | None:
        """Computes `tokens` as the continuation of a sequence, in one step.

        Args:
            sequence: whose cache is extended; unchanged if the step is cancelled or fails.
            tokens: at most `rows` token ids.
            phase: prefill or decode, for counters.
            logits_of: which of these tokens' logits are wanted: places in `tokens`, negative ones from its end.
            cancelled: asked before the step and at each layer where native code does not go on by itself; True gives
                the step up. Native code looks at a `CancelWord` at every layer.
            observe: shown each layer's routes.
            keep: the logits stay as they are; else until the next step.

        Returns:
            float32 [len(logits_of), vocabulary], or None if the step was cancelled.

        Raises:
            LimitExceeded: a token id outside the vocabulary, too many tokens, or a full context or cache.
            TierdError: of the expert source.
        """
        count, start = len(tokens), len(sequence.tokens)
        if not 0 < count <= self.rows:
            raise LimitExceeded(f"a step of {count} tokens is outside 1 to {self.rows}")
        if start + count > sequence.context:
            sequence.require(count)
        if start + count > sequence.pages * PAGE and not self.cache.reserve(sequence, count):
            raise LimitExceeded(
                f"the KV cache has no room for {count} more tokens: other sequences hold its pages",
                hint="Use a larger --kv-cache.",
            )
        if count == len(logits_of) == 1 and observe is None and self._asleep():
            logits = self._forward_one(tokens[0], start, sequence, phase, cancelled)
        else:
            logits = self.forward(
                tokens,
                range(start, start + count),
                (sequence,) * count,
                phase=phase,
                logits_of=[index % count for index in logits_of],
                cancelled=cancelled,
                observe=observe,
            )
        if logits is None:
            return None
        self.cache.advance(sequence, tokens)
        return logits.copy() if keep else logits

    def forward(
        self,
        tokens: Listing[int],
        positions: Listing[int],
        sequences: Listing[Sequence],
        *,
        phase: Phase,
        logits_of: Listing[int],
        cancelled: Cancelled | None = None,
        observe: Observe | None = None,
        unwanted: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.float32] | None:
        """One step over rows that may belong to several sequences; see `extend` for the rest.

        The caller has reserved room in the cache, and calls `cache.advance` for each sequence after a step that was
        not cancelled.

        Args:
            tokens: n token ids.
            positions: n, below the context length; rows of a sequence are consecutive and rising.
            sequences: n, whose row each is.
            phase: prefill or decode.
            logits_of: rows whose logits are wanted, 0 to n - 1.
            cancelled: see `extend`.
            observe: see `extend`.
            unwanted: bool [n], may be set by any thread while the step runs: nobody wants these rows any more. From
                the next layer on that waits in Python no expert is fetched for them alone. Not all at once.

        Returns:
            As `extend`; the logits stand until the next step. `likeliest` then says which are the largest.
        """
        unseen = observe is None and self._asleep()
        rows, times = len(tokens), self.times
        if unseen and rows == len(logits_of) == 1:
            return self._forward_one(tokens[0], positions[0], sequences[0], phase, cancelled)
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < self._vocabulary:
                raise LimitExceeded(f"token id {token} is outside the vocabulary of {self._vocabulary} tokens")
        begun, step = perf_counter(), times.steps
        times.steps = step + 1
        try:
            if cancelled is not None and cancelled():
                return None
            self._batch.set(
                tokens,
                positions,
                tables=[sequence.address for sequence in sequences],
                limits=[sequence.limit for sequence in sequences],
                states_in=[sequence.state_in for sequence in sequences],
                states_out=[sequence.state_out for sequence in sequences],
            )
            self._head.choose(logits_of)
            if unseen:
                cancel = cancelled.address if isinstance(cancelled, CancelWord) else 0
                layer = self._steps.run_unseen(rows, step, phase, cancel)
                whole = layer is None or self._go_on(layer, rows, step, phase, cancelled, unwanted)
            else:
                whole = self._run_seen(tokens, positions, sequences, step, phase, cancelled, observe, unwanted)
            if not whole:
                return None
            logits, self.likeliest = self._head.logits(logits_of)
            return logits
        finally:
            times.seconds += perf_counter() - begun

    def _asleep(self) -> bool:
        """Whether nothing has been lacking for long, so that a step need not be looked into."""
        return self._foresight.asleep and (self.hinting is None or self.hinting.asleep)

    def _forward_one(
        self, token: int, position: int, sequence: Sequence, phase: Phase, cancelled: Cancelled | None
    ) -> NDArray[np.float32] | None:
        """`forward` of one row whose logits are wanted, in a step that nobody looks into.

        It is all that one text needs between two steps, so it says in one piece what others say in many: after a
        native run the processor's caches hold weights, and each object and each function that Python touches comes
        from memory anew.
        """
        if not 0 <= token < self._vocabulary:
            raise LimitExceeded(f"token id {token} is outside the vocabulary of {self._vocabulary} tokens")
        times, cancel = self.times, 0
        if cancelled is not None:
            if isinstance(cancelled, CancelWord):
                cancel = cancelled.address  # native code looks at it before the first layer's experts
            elif cancelled():
                return None
        begun, step = perf_counter(), times.steps
        times.steps = step + 1
        try:
            layer = self._steps.run_one(token, position, sequence, step, phase, cancel)
            if layer is not None and not self._go_on(layer, 1, step, phase, cancelled, None):
                return None
        finally:
            times.seconds += perf_counter() - begun
        self.likeliest = [self._likeliest[0]]
        return self._one_row

    def _run_seen(
        self,
        tokens: Listing[int],
        positions: Listing[int],
        sequences: Listing[Sequence],
        step: int,
        phase: Phase,
        cancelled: Cancelled | None,
        observe: Observe | None,
        unwanted: NDArray[np.bool_] | None,
    ) -> bool:
        """A step that somebody looks into or learns from; False if it was given up."""
        begun, rows = perf_counter(), len(tokens)
        awake = not self._asleep()
        meanwhile, passing = self._look_out(tokens, positions, sequences, step, phase) if awake else (None, None)
        cancel = cancelled.address if isinstance(cancelled, CancelWord) else 0
        self._steps.begin(rows, step=step, phase=phase, observed=observe is not None, cancel=cancel, passing=passing)
        layer = self._steps.run()
        whole = self._go_on(layer, rows, step, phase, cancelled, unwanted, observe, meanwhile)
        if whole and awake:
            self._look_back(step, phase, begun)
        return whole

    def _go_on(
        self,
        layer: int | None,
        rows: int,
        step: int,
        phase: Phase,
        cancelled: Cancelled | None,
        unwanted: NDArray[np.bool_] | None,
        observe: Observe | None = None,
        meanwhile: Callable[[int, NDArray[np.float32]], None] | None = None,
    ) -> bool:
        """Brings the experts of this layer and of each where the step stops, if any; False if it was given up."""
        stats, routes = self.source.stats, self._program.route_indices[:rows]
        waited = stats.wait_seconds
        try:
            while layer is not None:
                if cancelled is not None and cancelled():
                    return False
                self._stop_at(layer, routes, unwanted)
                self._experts.run(layer, rows, step=step, phase=phase, observe=observe, meanwhile=meanwhile)
                layer = self._steps.run()
        finally:
            if stats.wait_seconds != waited:
                self.times.wait_seconds += stats.wait_seconds - waited
                self._foresight.waited()
        return True

    def _look_out(
        self, tokens: Listing[int], positions: Listing[int], sequences: Listing[Sequence], step: int, phase: Phase
    ) -> tuple[Callable[[int, NDArray[np.float32]], None] | None, Callable[[int], None] | None]:
        """What will this step want? Returns what is to be called while it waits, and what where it does not."""
        self._foresight.begin(self.source.step_memory, tokens, positions, [sequence.place for sequence in sequences])
        hinting = self.hinting
        if hinting is None:
            return None, None
        hinting.begin(tokens, step=step, decode=phase is Phase.DECODE)

        def passing(layer: int) -> None:
            hinting.passing(layer, self._program.route_indices[: len(tokens)])

        return hinting.meanwhile if hinting.active else None, passing if hinting.everywhere else None

    def _stop_at(self, layer: int, routes: NDArray[np.int32], unwanted: NDArray[np.bool_] | None) -> None:
        """The step stops at a layer that wants these experts: int32 [rows, top_k]."""
        if unwanted is not None and unwanted.any():
            routes[unwanted] = routes[np.argmin(unwanted)]
        self._foresight.at(layer, routes)
        if self.hinting is not None:
            self.hinting.at(layer, routes)

    def _look_back(self, step: int, phase: Phase, begun: float) -> None:
        """The step is complete: what is to be learned from it."""
        self._foresight.end(step)
        if self.hinting is not None and phase is Phase.DECODE:
            self.hinting.end(perf_counter() - begun)

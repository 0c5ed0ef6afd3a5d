"""A loaded model: from token ids at given positions to logits, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Listing
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from compute_node.engine.cache_budget import pages_of
from compute_node.engine.cancel import CancelWord
from compute_node.engine.executor import Executor
from compute_node.engine.expert_step import ExpertPoint
from compute_node.engine.kv_cache import KVCache, Sequence
from compute_node.engine.model_options import DEFAULT_CONTEXT, EXECUTIONS, ModelOptions
from compute_node.engine.step import StepRunner
from compute_node.engine.step_times import StepTimes
from compute_node.engine.weights import Weights
from compute_node.kernels import NUMERICS, quantises
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
from tierd.errors import LimitExceeded, UsageError
from tierd.policy.token_table import TokenTable

__all__ = ["DEFAULT_CONTEXT", "EXECUTIONS", "Cancelled", "Model", "ModelOptions", "Observe"]

_NO_STATES: Final = (0, 0)

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
        context = min(config.max_positions, DEFAULT_CONTEXT) if options.context is None else options.context
        if not 1 <= context <= config.max_positions:
            raise UsageError(
                f"--context {context} is outside 1 to {config.max_positions}, the context of this checkpoint"
            )
        if min(options.rows, options.head_rows) < 1:
            raise UsageError("a step has at least one row")
        numerics = options.numerics
        if numerics not in NUMERICS:
            raise UsageError(f"unknown numerics {numerics!r}", hint=f"Known: {', '.join(NUMERICS)}.")
        if options.execution not in EXECUTIONS:
            raise UsageError(f"unknown execution {options.execution!r}", hint=f"Known: {', '.join(EXECUTIONS)}.")
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
        self._recurrent = layout.recurrent
        self._head_rows = -1
        self._head_cell = self._program.head_index.data
        self._likeliest = self._program.likeliest.data
        self._one_row = self._program.logits[:1]
        self.dense_bytes = weights.nbytes
        self._executor = Executor(options.threads)
        self._foresight = Foresight(geometry)
        self.hinting: StepHints | None = step_hints(
            options.prefetch, source, geometry, self._program.look_ahead, self._executor.run, self._foresight.table
        )
        self._experts = ExpertPoint(
            source, geometry, self._program, self._executor, numerics=numerics, by_ops=options.execution == "ops"
        )
        self._steps = StepRunner(
            source, geometry, self._program, self._executor, numerics=numerics, execution=options.execution
        )

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
        logits = self.forward(
            tokens,
            range(start, start + count),
            (sequence,) * count,
            phase=phase,
            logits_of=(0,) if count == 1 and len(logits_of) == 1 else [index % count for index in logits_of],
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
        program, times, stats, rows = self._program, self.times, self.source.stats, len(tokens)
        for token in tokens if rows == 1 else (min(tokens), max(tokens)):
            if not 0 <= token < self.config.vocab_size:
                raise LimitExceeded(f"token id {token} is outside the vocabulary of {self.config.vocab_size} tokens")
        begun, waited = time.perf_counter(), stats.wait_seconds
        try:
            if cancelled is not None and cancelled():
                return None
            cancel = cancelled.address if isinstance(cancelled, CancelWord) else 0
            awake = self.hinting is not None or not self._foresight.asleep
            if rows == 1:
                one = sequences[0]
                states = (one.state_in, one.state_out) if self._recurrent else _NO_STATES
                self._batch.set_one(tokens[0], positions[0], one.address, one.pages * PAGE, *states)
            else:
                self._place(tokens, positions, sequences)
            self._choose(logits_of)
            if awake or observe is not None:
                meanwhile, passing = self._look_out(tokens, positions, sequences, phase) if awake else (None, None)
                self._steps.begin(
                    rows, step=times.steps, phase=phase, observed=observe is not None, cancel=cancel, passing=passing
                )
                layer = self._steps.run()
            else:
                meanwhile, layer = None, self._steps.run_unseen(rows, times.steps, phase, cancel)
            while layer is not None:
                if cancelled is not None and cancelled():
                    return None
                self._stop_at(layer, program.route_indices[:rows], unwanted)
                self._experts.run(layer, rows, step=times.steps, phase=phase, observe=observe, meanwhile=meanwhile)
                layer = self._steps.run()
            if awake:
                self._look_back(phase, begun)
            return self._logits(logits_of)
        finally:
            times.steps += 1
            times.seconds += time.perf_counter() - begun
            times.wait_seconds += stats.wait_seconds - waited

    def _look_out(
        self, tokens: Listing[int], positions: Listing[int], sequences: Listing[Sequence], phase: Phase
    ) -> tuple[Callable[[int, NDArray[np.float32]], None] | None, Callable[[int], None] | None]:
        """What will this step want? Returns what is to be called while it waits, and what where it does not."""
        numbers = [sequence.place for sequence in sequences]
        self._foresight.begin(self.source.step_memory, tokens, positions, numbers)
        hinting = self.hinting
        if hinting is None:
            return None, None
        hinting.begin(tokens, step=self.times.steps, decode=phase is Phase.DECODE)

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

    def _look_back(self, phase: Phase, begun: float) -> None:
        """The step is complete: what is to be learned from it."""
        self._foresight.end(self.times.steps)
        if self.hinting is not None and phase is Phase.DECODE:
            self.hinting.end(time.perf_counter() - begun)

    def _place(self, tokens: Listing[int], positions: Listing[int], sequences: Listing[Sequence]) -> None:
        """Makes these the live rows, each at its place in the KV cache."""
        self._batch.set(
            tokens,
            positions,
            tables=[sequence.address for sequence in sequences],
            limits=[sequence.limit for sequence in sequences],
            states_in=[sequence.state_in for sequence in sequences],
            states_out=[sequence.state_out for sequence in sequences],
        )

    def _choose(self, rows: Listing[int]) -> None:
        """Makes the first of these the rows that go through the LM head, as many as it takes."""
        program, count = self._program, len(rows)
        if count == self._head_rows == 1:
            self._head_cell[0] = rows[0]
            return
        count = min(count, program.head_batch.max_rows)
        program.head_index[:count] = rows[:count]
        if count != self._head_rows:
            program.head_batch.set_rows(count)
            self._head_rows = count

    def _logits(self, rows: Listing[int]) -> NDArray[np.float32]:
        """The logits of the rows; those that did not fit the step's own run of the head are computed now."""
        program, count = self._program, len(rows)
        most = program.head_batch.max_rows
        if count == 1:
            self.likeliest = [self._likeliest[0]]
            return self._one_row
        self.likeliest = self._likeliest[: min(count, most)].tolist()
        if count <= most:
            return program.logits[:count]
        logits = np.empty((count, self.config.vocab_size), np.float32)
        logits[:most] = program.logits
        for first in range(most, count, most):
            part = min(most, count - first)
            self._choose(rows[first:])
            self._executor.run(program.head)
            logits[first : first + part] = program.logits[:part]
            self.likeliest += self._likeliest[:part].tolist()
        return logits

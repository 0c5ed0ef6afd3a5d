"""What the arena costs a node: the same model, all experts resident, from a daemon and from the node's own memory.

The sides alternate, token by token the same inputs; their logits must be equal bit for bit. Inputs are drawn at random:
a model of random weights that hears itself soon repeats a few experts.
"""

from __future__ import annotations

import hashlib
import re
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compute_node.bench.quiet import Quiet
from compute_node.engine.executor import Executor
from compute_node.engine.expert_step import kernel_layout
from compute_node.engine.kernel_path import kernel_path
from compute_node.engine.model import Model, ModelOptions
from compute_node.kernels import Batch, Binding, ExpertGroup, ExpertShape, Segment
from tierd.client.arena_source import ArenaSource
from tierd.client.in_process import InProcess
from tierd.client.private_daemon import PrivateDaemon
from tierd.client.source import DirectAccess, ExpertSource, Phase
from tierd.errors import TierdError
from tierd.store.geometry import Geometry
from tierd.store.store import ExpertStore

__all__ = ["measure_arena"]

# Both sides compute the same, so the faster arithmetic shows the cost of the words better.
_NUMERICS: Final = "fast"
_PROMPT: Final = 4
_LOOKS: Final = 2_000
_WAIT_SECONDS: Final = 60.0


class _Side:
    """One model on one source, with every expert in RAM.

    Attributes:
        source: of the experts.
        speeds: tokens per second of each run.
        logits: hash of the logits of each run.
    """

    def __init__(self, source: ExpertSource, threads: int | None) -> None:
        self.source = source
        self.model = Model(source, ModelOptions(numerics=_NUMERICS, threads=threads))
        self.speeds: list[float] = []
        self.logits: list[str] = []

    def fill(self) -> None:
        """Bring all experts into RAM."""
        for entry in self.source.store.manifest.geometry.layers:
            experts = list(range(entry.experts))
            self.source.visit(entry.layer, experts, lambda _expert, _address: None, step=0, phase=Phase.PREFILL)

    def run(self, tokens: list[int]) -> float:
        """Decode these tokens, one step each; returns the seconds that it took."""
        sequence, digest = self.model.cache.take(), hashlib.blake2b(digest_size=8)
        self.model.extend(sequence, tokens[:_PROMPT], phase=Phase.PREFILL)
        begun = time.perf_counter()
        for token in tokens[_PROMPT:]:
            logits = self.model.extend(sequence, [token], phase=Phase.DECODE)
            assert logits is not None
            digest.update(logits.tobytes())
        seconds = time.perf_counter() - begun
        self.model.cache.give_back(sequence)
        self.speeds.append((len(tokens) - _PROMPT) / seconds)
        self.logits.append(digest.hexdigest())
        return seconds


def measure_arena(
    store: ExpertStore, *, tokens: int, rounds: int, threads: int | None, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Run the bench.

    Args:
        store: with a model's dense weights.
        tokens: per run.
        rounds: runs of each side, alternating.
        threads: native threads; None: the cores that the process may use.
        progress: takes a line for people now and then.

    Returns:
        The figures, and the raw ones behind them.

    Raises:
        TierdError: of the daemon or the store, or the two sides did not compute the same bits.
    """
    rng = np.random.Generator(np.random.Philox(key=11))
    with ExitStack() as stack:
        progress("starting a daemon with room for all experts")
        daemon = PrivateDaemon(
            store.path, "--arena", "100%", "--http", "off", "--log-level", "warning", "--history", "off"
        )
        stack.callback(daemon.stop)
        through = _attach(daemon, store, "bench")
        sides = {
            "through_daemon": _open_side(stack, through, threads),
            "in_process": _open_side(stack, InProcess(store), threads),
            "in_process_4k": _open_side(stack, InProcess(store, huge_pages=False), threads),
        }
        progress("reading all experts, three times")
        for side in sides.values():
            side.fill()
            side.run(_draw(rng, _PROMPT + 2, side))
            side.speeds.clear()
            side.logits.clear()
        _until_idle(through)
        messages = through.messages_sent
        with Quiet() as quiet:
            for number in range(rounds):
                progress(f"round {number + 1} of {rounds}")
                drawn = _draw(rng, _PROMPT + tokens, sides["in_process"])
                # The order turns round, so that a drift of the machine touches all alike.
                for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
                    sides[name].run(drawn)
        messages = through.messages_sent - messages
        if len({tuple(side.logits) for side in sides.values()}) != 1:
            raise TierdError("the sides computed different logits", hint="This is a defect; please report it.")
        direct = through.direct
        seconds = _seconds_per_expert(store.geometry, direct) if direct is not None else None
        pages = {name: _huge_share(side.source.direct, store.geometry) for name, side in sides.items()}
    progress("two nodes on an arena for half of the experts")
    discards = _discards(store, rng, tokens)
    medians = {name: statistics.median(side.speeds) for name, side in sides.items()}
    return {
        "through_daemon_ratio": medians["through_daemon"] / medians["in_process"],
        "seconds_per_resident_expert": seconds,
        "rpcs_per_token": messages / (rounds * tokens),
        "discard_share": discards["discarded"] / discards["unasked"] if discards["unasked"] else 0.0,
        "small_pages_ratio": medians["in_process_4k"] / medians["in_process"],
        "tokens_per_second": {name: side.speeds for name, side in sides.items()},
        "huge_page_share": pages,
        "logits": sides["through_daemon"].logits,
        "two_nodes": discards,
        "layers": len(store.geometry.layers),
        "tokens": tokens,
        "threads": sides["through_daemon"].model.threads,
        "numerics": _NUMERICS,
        "kernel_path": kernel_path(),
        **quiet.report(),
    }


def _open_side(stack: ExitStack, source: ExpertSource, threads: int | None) -> _Side:
    stack.callback(source.close)
    side = _Side(source, threads)
    stack.callback(side.model.close)
    return side


def _attach(daemon: PrivateDaemon, store: ExpertStore, name: str) -> ArenaSource:
    return ArenaSource(
        daemon.address, store, name=name, numerics=_NUMERICS, kernel_path=kernel_path(), gone=daemon.gone
    )


def _draw(rng: np.random.Generator, count: int, side: _Side) -> list[int]:
    return [int(token) for token in rng.integers(0, side.model.config.vocab_size, count)]


def _until_idle(source: ArenaSource) -> None:
    """The release after the last miss comes a little later than it."""
    sent, deadline = -1, time.monotonic() + _WAIT_SECONDS
    while sent != source.messages_sent and time.monotonic() < deadline:
        sent = source.messages_sent
        time.sleep(0.2)


def _seconds_per_expert(geometry: Geometry, direct: DirectAccess) -> float:
    """Time of the native step to find, check and count a resident expert, computing on none; the best of some tries."""
    entry, k = geometry.layers[0], geometry.top_k
    layout = kernel_layout(geometry.layouts[entry.layout], geometry.hidden_size, geometry.intermediate_size)
    x = np.zeros((1, geometry.hidden_size), np.float32)
    rows = np.zeros((1, k, geometry.hidden_size), np.float32)
    indices: NDArray[np.int32] = np.arange(k, dtype=np.int32).reshape(1, k)
    batch, binding = Batch(1), Binding()
    batch.set_rows(1)
    # Counted in memory of our own: the daemon must not take these for uses.
    counters = np.zeros((3, direct.entries), np.uint32)
    binding.point(
        table=direct.table,
        payload=direct.payload,
        slot_bytes=direct.slot_bytes,
        last_step=counters[0].ctypes.data,
        uses=counters[1].ctypes.data,
        step_word=np.zeros(1, np.uint64).ctypes.data,
        in_use=counters[2].ctypes.data,
    )
    shape = ExpertShape("bench", x, rows, geometry.intermediate_size, layout.format)
    group = ExpertGroup(shape, indices, batch, binding, rows=1, experts=entry.experts)
    plan, _, _, check = group.ops("bench", layout, start=geometry.layer_start(entry.layer), experts=entry.experts)
    segment, times = Segment("bench", [plan, check] * _LOOKS), []
    with Executor(1) as executor:
        for _ in range(9):
            begun = time.perf_counter()
            executor.run(segment)
            times.append(time.perf_counter() - begun)
    if binding.used != 9 * _LOOKS * k or binding.discarded:
        raise TierdError("an expert of the full arena was not resident", hint="This is a defect; please report it.")
    return min(times) / (_LOOKS * k)


def _discards(store: ExpertStore, rng: np.random.Generator, tokens: int) -> dict[str, Any]:
    """Two nodes of one thread each share an arena that holds half of the experts."""
    daemon = PrivateDaemon(store.path, "--arena", "50%", "--http", "off", "--log-level", "warning", "--history", "off")
    failures: list[BaseException] = []

    def work(side: _Side, drawn: list[int]) -> None:
        try:
            side.run(drawn)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            failures.append(error)

    with ExitStack() as stack:
        stack.callback(daemon.stop)
        nodes = [_open_side(stack, _attach(daemon, store, f"bench {number}"), 1) for number in range(2)]
        workers = [
            threading.Thread(target=work, args=(node, _draw(rng, _PROMPT + tokens, node)), daemon=True)
            for node in nodes
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failures:
            raise failures[0]
        stats = [node.source.stats for node in nodes]
        return {
            "unasked": sum(one.unasked for one in stats),
            "discarded": sum(one.discarded for one in stats),
            "requested": sum(one.requested for one in stats),
            "messages": sum(one.messages for one in stats),
        }


def _huge_share(direct: DirectAccess | None, geometry: Geometry) -> float:
    """Of the experts' bytes, the share on 2 MiB pages in this process, by /proc/self/smaps."""
    if direct is None:
        return 0.0
    huge = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(address, 16) for address in found.groups())
            inside = begin <= direct.payload < end
        elif inside and (found := re.match(r"(?:AnonHugePages|ShmemPmdMapped|FilePmdMapped):\s+(\d+) kB", line)):
            huge += int(found[1]) << 10
    return min(1.0, huge / (geometry.experts_total * geometry.slot_bytes))

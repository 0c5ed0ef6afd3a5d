"""What a node's own hints gain or cost where experts are tiny: the embedded model, its texts, a drive as it is."""

from __future__ import annotations

import hashlib
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compute_node import embedded
from compute_node.bench.quiet import Quiet
from compute_node.engine.kernel_path import kernel_path
from compute_node.engine.model import Model, ModelOptions
from tierd.checkpoint.convert import convert
from tierd.client.arena_source import ArenaSource
from tierd.client.private_daemon import PrivateDaemon
from tierd.client.source import Phase
from tierd.errors import TierdError
from tierd.store.store import ExpertStore

__all__ = ["measure_embedded"]

_ARENA: Final = "25%"
_TOKENS: Final = 128
_SETTLING: Final = 4


def measure_embedded(texts: Sequence[NDArray[np.int64]], *, rounds: int, threads: int | None) -> dict[str, Any]:
    """Decodes texts token by token, in alternating runs with hints (`auto`) and without.

    Args:
        texts: token ids of a text for each run in turn, at least two tokens; the first ones are learned from only.
        rounds: runs of each side. Both sides of a round decode the same text.
        threads: native threads.

    Raises:
        TierdError: the two sides of a round computed different logits.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierd-bench-")))
        convert(embedded.path(), folder / "store", experts="int4-g64", dense="int8")
        store = ExpertStore.open(folder / "store")
        daemon = PrivateDaemon(
            store.path, "--arena", _ARENA, "--http", "off", "--log-level", "warning", "--history", "off"
        )
        stack.callback(daemon.stop)
        source = ArenaSource(
            daemon.address, store, name="bench", numerics="exact", kernel_path=kernel_path(), gone=daemon.gone
        )
        stack.callback(source.close)
        options = ModelOptions(context=_TOKENS + 1, threads=threads, prefetch="auto")
        model = stack.enter_context(Model(source, options))
        hinting = model.hinting
        for number in range(_SETTLING):
            _decode(model, texts[number % len(texts)])
        sides: dict[str, list[float]] = {"off": [], "auto": []}
        quiet = Quiet(beside=[daemon.pid])
        with quiet:
            for number in range(rounds):
                logits = set()
                for side in ("off", "auto") if number % 2 == 0 else ("auto", "off"):
                    model.hinting = hinting if side == "auto" else None
                    seconds, digest = _decode(model, texts[(_SETTLING + number) % len(texts)])
                    sides[side].append(seconds)
                    logits.add(digest)
                if len(logits) != 1:
                    raise TierdError("runs computed different logits", hint="This is a defect; please report it.")
    off, auto = (statistics.median(sides[side]) for side in ("off", "auto"))
    return {
        "speedup": statistics.median(o / a for o, a in zip(sides["off"], sides["auto"], strict=True)),
        "off_seconds_per_token": off,
        "auto_seconds_per_token": auto,
        "runs": sides,
        "hints_sent": source.stats.hints,
        "throttle_level": getattr(getattr(hinting, "throttle", None), "level", None),
        **quiet.report(),
    }


def _decode(model: Model, text: NDArray[np.int64]) -> tuple[float, str]:
    """Seconds per token of the text's beginning, and a hash of all logits."""
    sequence, digest = model.cache.take(), hashlib.blake2b(digest_size=8)
    tokens = text[:_TOKENS].tolist()
    before = model.times.seconds
    for token in tokens:
        logits = model.extend(sequence, [token], phase=Phase.DECODE)
        assert logits is not None
        digest.update(logits.tobytes())
    model.cache.give_back(sequence)
    return (model.times.seconds - before) / len(tokens), digest.hexdigest()

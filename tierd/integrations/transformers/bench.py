"""Decode speed with tierd's experts: beside the unmodified model in RAM, and beside accelerate's disk offload.

All run the same layer sizes (OLMoE-1B-7B, fewer layers), bf16 on the CPU, on the same given routes, which use experts
again as often as recorded ones do. Sides take turns token group by token group; a ratio is a median over turns.

accelerate decides by itself what it offloads (`device_map="auto"` with `max_memory`), as people use it: it takes whole
layers and the LM head, and keeps room for its largest layer. By hand one can do better, and put experts only on disk.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tierd.checkpoint.convert import Conversion
from tierd.drivebench.noise import TOO_MUCH, OtherWork
from tierd.integrations.transformers.architecture import config_of, model_class, quiet
from tierd.integrations.transformers.bench_model import OLMOE_1B_7B, force_routes, make_checkpoint
from tierd.integrations.transformers.caching import cache_of, with_cache
from tierd.integrations.transformers.load_memory import measure_load
from tierd.integrations.transformers.loading import load
from tierd.policy.drawn_routes import RECORDED
from tierd.store.manifest import MANIFEST_FILE
from tierd.store.store import ExpertStore

__all__ = ["PARTS", "Effort", "measure"]

PARTS: Final = ("resident", "offload", "offload-by-hand", "load")
_PROMPT: Final = 4
_WARM_TOKENS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured.

    Attributes:
        layers: of the model.
        turns: of each side.
        tokens: of one turn.
        arena: RAM for experts in the comparison with offload, as a share of all; offload keeps the same share.
        threads: of torch; None: its own choice.
        say: takes a line when something begins.
    """

    layers: int
    turns: int
    tokens: int
    arena: float
    threads: int | None
    say: Callable[[str], None]


def measure(folder: Path, effort: Effort, parts: tuple[str, ...] = PARTS) -> dict[str, Any]:
    """Makes checkpoint and store in `folder`, which are kept there, and measures.

    Returns:
        For JSON: `resident_ratio`, `offload_ratio`, `offload_by_hand_ratio`, `load_within` (see `measure_load`), None
        where not measured; raw sides and circumstances.
    """
    if effort.threads is not None:
        torch.set_num_threads(effort.threads)
    config = OLMOE_1B_7B | {"num_hidden_layers": effort.layers}
    checkpoint, store = folder / f"olmoe-{effort.layers}-checkpoint", folder / f"olmoe-{effort.layers}-store"
    answer: dict[str, Any] = dict.fromkeys(("resident_ratio", "offload_ratio", "offload_by_hand_ratio", "load_within"))
    answer["details"] = {}
    if "load" in parts:
        effort.say("loading a store of OLMoE-1B-7B's sizes")
        answer["details"]["load"] = measure_load(folder)
        answer["load_within"] = answer["details"]["load"]["within"]
    if not set(parts) - {"load"}:
        return answer | {"void": False, "foreign_cpu_share": 0.0}
    effort.say("checkpoint and store, which are made at the first run and may take minutes")
    make_checkpoint(checkpoint, config)
    if not (store / MANIFEST_FILE).exists():
        Conversion.prepare(checkpoint, store, experts="bf16", dense="bf16").run()
    routes = RECORDED.generate(
        tokens=max(256, (effort.turns + 2) * effort.tokens + _WARM_TOKENS),
        layers=effort.layers,
        experts=config["num_experts"],
        top_k=config["num_experts_per_tok"],
    )
    others = OtherWork()
    answer |= {
        "geometry": "olmoe-1b-7b",
        "layers": effort.layers,
        "of_layers": OLMOE_1B_7B["num_hidden_layers"],
        "dtype": "bfloat16",
        "threads": torch.get_num_threads(),
        "tokens_per_turn": effort.tokens,
    }
    if "resident" in parts:
        answer["details"]["resident"] = _resident(checkpoint, store, routes, effort)
        answer["resident_ratio"] = answer["details"]["resident"]["ratio"]
    for part in ("offload", "offload-by-hand"):
        if part in parts:
            found = _offload(checkpoint, store, folder / part, routes, effort, by_hand=part == "offload-by-hand")
            answer["details"][part] = found
            answer[f"{part.replace('-', '_')}_ratio"] = found["ratio"]
    answer["foreign_cpu_share"] = others.share()
    answer["void"] = answer["foreign_cpu_share"] > TOO_MUCH
    return answer


class _Side:
    """One model that decodes given tokens, and the speed of each turn."""

    def __init__(self, model: Any, routes: np.ndarray, before: Callable[[], None] = lambda: None) -> None:
        force_routes(model, routes)
        self.model = model
        self.speeds: list[float] = []
        self.read_bytes = 0
        self.tokens = 0
        self._before = before
        with torch.inference_mode():
            answer = model(input_ids=torch.arange(1, _PROMPT + 1)[None], use_cache=True)
        self._past = cache_of(answer)
        self._token = torch.tensor([[1]])

    def run(self, tokens: int) -> float:
        """Decodes so many tokens; tokens per second, without what `before` takes."""
        seconds = 0.0
        self.tokens += tokens
        for _ in range(tokens):
            self._before()
            read, begun = _bytes_read(), time.perf_counter()
            with torch.inference_mode():
                answer = self.model(input_ids=self._token, **with_cache(self.model, self._past))
                self._token = answer.logits[:, -1:].argmax(-1)
            seconds += time.perf_counter() - begun
            self.read_bytes += _bytes_read() - read
        return tokens / seconds

    def turn(self, tokens: int) -> None:
        """One that counts."""
        self.speeds.append(self.run(tokens))

    def figures(self) -> dict[str, Any]:
        """Median and raw speeds in tokens per second."""
        return {"tokens_per_second": statistics.median(self.speeds), "turns": self.speeds}


def _resident(checkpoint: Path, store: Path, routes: np.ndarray, effort: Effort) -> dict[str, Any]:
    effort.say("everything in RAM: the unmodified model, and tierd")
    with quiet():
        plain = model_class(config_of(checkpoint)).from_pretrained(checkpoint, dtype=torch.bfloat16)
    tiered = load(store, dtype=torch.bfloat16, arena="100%", name="bench")
    try:
        sides = [_Side(plain.eval(), routes), _Side(tiered, routes)]
        _fill(tiered, effort)
        _alternate(sides, effort)
        stats = tiered.tierd.stats
        found = _compared(sides[1], sides[0], "unmodified")
        found["share_of_hits"] = stats.outcomes["hit"] / max(1, stats.requested)
        return found
    finally:
        tiered.tierd.close()
        del plain, tiered
        gc.collect()


def _offload(
    checkpoint: Path, store: Path, scratch: Path, routes: np.ndarray, effort: Effort, *, by_hand: bool
) -> dict[str, Any]:
    effort.say("a share of the experts in RAM: accelerate's disk offload, and tierd")
    scratch.mkdir(parents=True, exist_ok=True)
    for old in scratch.iterdir():
        old.unlink()
    manifest = ExpertStore.open(store).manifest
    memory = manifest.dense_bytes + int(effort.arena * manifest.geometry.expert_bytes)
    kept = round(effort.arena * effort.layers)
    placed: dict[str, Any] = (
        {"device_map": _places(effort.layers, kept)}
        if by_hand
        else {"device_map": "auto", "max_memory": {"cpu": memory}}
    )
    with quiet():
        offloaded = model_class(config_of(checkpoint)).from_pretrained(
            checkpoint, dtype=torch.bfloat16, offload_folder=str(scratch), **placed
        )
    on_disk = sorted(name for name, place in offloaded.hf_device_map.items() if place == "disk")
    tiered = load(store, dtype=torch.bfloat16, arena=f"{100 * effort.arena:g}%", name="bench")
    files = [*scratch.glob("*.safetensors"), *checkpoint.glob("*.safetensors")]
    try:
        sides = [_Side(offloaded.eval(), routes, lambda: _forget_pages(files)), _Side(tiered, routes)]
        sides[1].run(2 * routes.shape[1] * _WARM_TOKENS)
        stats = tiered.tierd.stats
        sides[0].read_bytes = sides[0].tokens = 0
        before = (stats.requested, stats.outcomes["hit"], sides[1].tokens)
        _alternate(sides, effort)
        asked, hits = stats.requested - before[0], stats.outcomes["hit"] - before[1]
        missed = (asked - hits) / (sides[1].tokens - before[2])
        found = _compared(sides[1], sides[0], "offload")
        found |= {
            "weights_memory_bytes": memory,
            "on_disk": on_disk,
            "arena_share": effort.arena,
            "share_of_hits": hits / max(1, asked),
            "offload_read_bytes_per_token": sides[0].read_bytes / max(1, sides[0].tokens),
            "tierd_read_bytes_per_token": missed * manifest.geometry.slot_bytes,
        }
        return found
    finally:
        tiered.tierd.close()
        del offloaded, tiered
        gc.collect()


def _places(layers: int, kept: int) -> dict[str, str]:
    """The experts of some layers in RAM, those of the others on disk, all else in RAM."""
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for part in ("self_attn", "input_layernorm", "post_attention_layernorm", "mlp.gate"):
            places[f"{prefix}.{part}"] = "cpu"
        places[f"{prefix}.mlp.experts"] = "cpu" if layer < kept else "disk"
    return places


def _alternate(sides: list[_Side], effort: Effort) -> None:
    for side in sides:
        side.run(max(1, effort.tokens // 4))
    for number in range(effort.turns):
        effort.say(f"turn {number + 1} of {effort.turns}")
        for side in sides if number % 2 == 0 else sides[::-1]:
            side.turn(effort.tokens)


def _compared(tiered: _Side, other: _Side, name: str) -> dict[str, Any]:
    ratios = [mine / theirs for mine, theirs in zip(tiered.speeds, other.speeds, strict=True)]
    return {"ratio": statistics.median(ratios), "ratios": ratios, "tierd": tiered.figures(), name: other.figures()}


def _fill(tiered: Any, effort: Effort) -> None:
    """Brings every expert into RAM."""
    source = tiered.tierd.source
    geometry = source.store.manifest.geometry
    runtime = tiered.tierd.runtime
    effort.say("filling the arena")
    for entry in geometry.layers:
        for first in range(0, entry.experts, geometry.top_k):
            wanted = list(range(first, min(first + geometry.top_k, entry.experts)))
            source.visit(entry.layer, wanted, lambda *_: None, step=runtime.step, phase=runtime.phase(1))


def _bytes_read() -> int:
    """That this process has had fetched from drives, by reads and by touching mapped files (proc(5), io)."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def _forget_pages(files: list[Path]) -> None:
    """Takes the files out of the page cache: what is offloaded because RAM is short is not in RAM either."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)  # pages that are not written yet would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

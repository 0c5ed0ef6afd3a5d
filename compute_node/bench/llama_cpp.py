"""The same model in llama.cpp, by the package `xllamacpp`: decode and prefill, in turn with this node.

Both sides have the same weights: what they say of the token behind a prompt shows whether they compute the same.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np

from compute_node.bench.gguf_file import write_gguf
from compute_node.bench.plain_read import plain_read
from compute_node.bench.quiet import Quiet
from compute_node.bench.random_model import RandomModel
from compute_node.bench.step_speed import resident
from compute_node.bench.token_walk import TokenWalk
from compute_node.engine.cores import default_threads
from compute_node.engine.executor import Executor
from compute_node.engine.likelihood import log_probabilities
from compute_node.engine.model import Model, ModelOptions
from tierd.client.source import Phase
from tierd.errors import TierdError, UsageError
from tierd.extras import install_hint
from tierd.store.reading import huge_page_buffer

__all__ = ["LlamaCpp", "measure_llama_cpp"]

_ASKED: Final = 8
"""Of the likeliest tokens behind the prompt, so many log-probabilities are compared."""
_MOST_APART: Final = 2.0
"""In these: beyond it the two sides do not compute the same, and the run is void. Other weights are 4 apart."""
_LEAST_SHARE: Final = 0.45
"""Of plain read bandwidth: below it llama.cpp spun against others for its cores, and the run is void."""


class LlamaCpp:
    """llama.cpp in this process, on one model.

    Args:
        path: of a GGUF.
        threads: as many as the other side has.
        context: most tokens of a sequence.

    Raises:
        UsageError: the package is not installed.
    """

    def __init__(self, path: Path, *, threads: int, context: int) -> None:
        try:
            import xllamacpp  # noqa: PLC0415 - an extra that only this measurement needs
        except ImportError:
            raise UsageError("the package xllamacpp is not installed", hint=install_hint("llama-cpp")) from None
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.n_gpu_layers, params.warmup = context, 1, 0, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.hostnames, params.port = ["127.0.0.1"], 0
        self._server = xllamacpp.Server(params)

    def run(self, prompt: list[int], tokens: int) -> dict[str, float]:
        """Computes a prompt and so many tokens after it: tokens per second of both, as llama.cpp times them.

        Raises:
            TierdError: it reported no times.
        """
        content = self._complete(prompt, tokens)
        times = content.get("timings")
        if not times:
            raise TierdError(f"llama.cpp gave no times: {str(content)[:200]}")
        return {"decode": float(times["predicted_per_second"]), "prefill": float(times["prompt_per_second"])}

    def likeliest(self, prompt: list[int]) -> dict[int, float]:
        """Log-probabilities of the likeliest tokens behind a prompt.

        Raises:
            TierdError: it reported none.
        """
        content = self._complete(prompt, 1, n_probs=_ASKED)
        try:
            first = content["choices"][0]["logprobs"]["content"][0]
            return {int(one["id"]): float(one["logprob"]) for one in first["top_logprobs"]}
        except (KeyError, IndexError, TypeError) as error:
            raise TierdError(f"llama.cpp gave no probabilities: {str(content)[:200]}") from error

    def _complete(self, prompt: list[int], tokens: int, **more: int) -> dict[str, Any]:
        wanted = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        answer = self._server.handle_completions(wanted | more)
        content = json.loads(answer) if isinstance(answer, str | bytes) else answer
        return content if isinstance(content, dict) else {"answer": content}


def measure_llama_cpp(
    config: dict[str, Any],
    *,
    threads: int | None,
    rounds: int,
    tokens: int,
    prompt: int,
    rows: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Both sides in turn, everything in RAM, 4-bit experts and 8-bit dense weights.

    Args:
        config: config.json of the model.
        threads: of both sides.
        rounds: turns of each side.
        tokens: decoded in a turn.
        prompt: tokens of the prompt whose prefill is timed.
        rows: prompt tokens that this side computes at once.
        tell: takes a line when something begins.
    """
    count = default_threads() if threads is None else threads
    sides: dict[str, list[dict[str, float]]] = {"ours": [], "llama_cpp": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llama-cpp-")))
        random = RandomModel(config)
        write_gguf(folder / "model.gguf", random, tell)
        context = prompt + tokens + 8
        theirs = LlamaCpp(folder / "model.gguf", threads=count, context=max(256, -(-context // 256) * 256))
        options = ModelOptions(numerics="fast", context=context, rows=rows, threads=count)
        model = stack.enter_context(Model(resident(random, tell), options))
        ids = np.random.Generator(np.random.Philox(5)).integers(0, 256, prompt).tolist()
        difference = _difference(model, ids, theirs.likeliest(ids))
        buffer = huge_page_buffer(1 << 30)
        buffer.view(np.int64)[:] = 1
        read, _ = plain_read(buffer)
        reader = stack.enter_context(Executor(count))
        quiet, reading = Quiet(), []
        with quiet:
            for number in range(rounds + 1):
                tell(f"round {number} of {rounds}")
                found = {"ours": _ours(model, prompt, tokens), "llama_cpp": theirs.run(ids, tokens)}
                begun = reader.native_seconds
                reader.run(read)
                if number:
                    reading.append(reader.native_seconds - begun)
                    for name, speeds in found.items():
                        sides[name].append(speeds)
    bytes_per_token = random.dense_bytes_of_a_token + random.expert_bytes_of_a_token
    plain = buffer.nbytes / float(np.median(reading))
    share = float(np.median([s["decode"] for s in sides["llama_cpp"]])) * bytes_per_token / plain
    facts = quiet.report()
    return {
        "decode_ratio": _ratio(sides, "decode"),
        "prefill_ratio": _ratio(sides, "prefill"),
        "llama_cpp_bandwidth_share": share,
        "largest_logprob_difference": difference,
        **facts,
        "void": facts["void"] or share < _LEAST_SHARE or difference > _MOST_APART,
        "bytes_per_token": bytes_per_token,
        "read_bytes_per_second": plain,
        "threads": count,
        **sides,
    }


def _difference(model: Model, prompt: list[int], theirs: dict[int, float]) -> float:
    """How far the two sides are apart in what they say of the token behind a prompt.

    Both quantise activations, each in its own way, so a router may choose otherwise where two experts are nearly equal.
    """
    sequence = model.cache.take()
    logits = None
    for start in range(0, len(prompt), model.rows):
        part = prompt[start : start + model.rows]
        logits = model.extend(sequence, part, phase=Phase.PREFILL, logits_of=(-1,))
    assert logits is not None
    ours = log_probabilities(np.repeat(logits[-1:], len(theirs), axis=0), list(theirs))
    model.cache.give_back(sequence)
    return float(np.abs(ours - list(theirs.values())).max())


def _ours(model: Model, prompt: int, tokens: int) -> dict[str, float]:
    walk = TokenWalk(model)
    prefill = walk.prefill(prompt)
    decode, _ = walk.run(tokens)
    walk.end()
    return {"decode": tokens / decode, "prefill": prompt / prefill}


def _ratio(sides: dict[str, list[dict[str, float]]], figure: str) -> float:
    pairs = zip(sides["ours"], sides["llama_cpp"], strict=True)
    return float(np.median([ours[figure] / theirs[figure] for ours, theirs in pairs]))

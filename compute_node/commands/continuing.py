"""What `compute-node generate` does: one answer, as text, as events, or as one object."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from compute_node.commands.applied_settings import generation_params
from compute_node.commands.opening import Opened, open_store
from compute_node.commands.report import REPORT_INDENT, AnswerReport
from compute_node.engine.generate import Finished, GenerationParams
from compute_node.engine.route_recorder import RouteRecorder
from compute_node.settings import NodeSettings
from compute_node.text.tokenizer import Tokenizer
from tierd.client.private_daemon import PrivateDaemon
from tierd.client.source import StoreView
from tierd.errors import UsageError
from tierd.terminal import show_hanging

__all__ = ["continue_text"]


def continue_text(
    store: str,
    settings: NodeSettings,
    text: str,
    stops: Sequence[str],
    *,
    daemon: PrivateDaemon | None,
    ignore_eos: bool,
    as_json: bool,
    events: bool,
    trace: Path | None,
) -> None:
    """Continues a text on standard output; figures follow on standard error.

    Args:
        store: as it was named.
        settings: of the node.
        text: to continue.
        stops: strings that end the answer.
        daemon: that was begun for the store; see `open_store`.
        ignore_eos: go on after an end-of-text token.
        as_json: one object at the end instead of text.
        events: lines of JSON instead of text.
        trace: file that gets which experts were chosen; None: nobody is told.

    Raises:
        TierdError: of the store, the daemon, or the model.
    """
    params = generation_params(settings, stop=list(stops), ignore_eos=ignore_eos)
    console = Console(stderr=True, highlight=False)
    with open_store(store, settings, name="generate", daemon=daemon, console=console, check=_check) as opened:
        if not (as_json or events):
            show_hanging(console, opened.headline(), indent=2, style="dim")
        recorder = None if trace is None else RouteRecorder(trace, opened.source.store.manifest.geometry)
        opened.generator.recorder = recorder
        try:
            report = _answer(opened, text, params, stream=not (as_json or events), events=events)
        finally:
            if recorder is not None:
                recorder.save()
    if recorder is not None and recorder.full:
        console.print(f"  {trace} holds the first {recorder.tokens:,} tokens only: it is at its bound", markup=False)
    if as_json:
        _line(report.as_object())
    elif events:
        _line({"event": "done"} | report.as_object())
    else:
        sys.stdout.write("\n")
        sys.stdout.flush()
        for line in report.lines():
            show_hanging(console, f"  {line}", indent=REPORT_INDENT, style="dim")


def _check(_store: StoreView, tokenizer: Tokenizer | None) -> None:
    if tokenizer is None:
        raise UsageError(
            "this store has no tokenizer.json, so it cannot continue text",
            hint="Put the model's tokenizer beside its weights, and convert it again.",
        )


def _answer(opened: Opened, text: str, params: GenerationParams, *, stream: bool, events: bool) -> AnswerReport:
    assert opened.tokenizer is not None
    prompt = opened.tokenizer.encode(text)
    before = opened.source.stats.snapshot()
    generation = opened.generator.generate(prompt, params)
    if events:
        _line(
            {
                "event": "start",
                "family": opened.model.config.family,
                "prompt_tokens": len(prompt),
                "context": opened.model.context,
                "threads": opened.model.threads,
                "fingerprint": opened.source.store.fingerprint,
            }
        )
    pieces: list[str] = []
    finished: Finished | None = None
    for event in generation:
        pieces.append(event.text)
        if stream and event.text:
            sys.stdout.write(event.text)
            sys.stdout.flush()
        if isinstance(event, Finished):
            finished = event
        elif events:
            _line({"event": "token", "id": event.token_id, "text": event.text, "seconds": event.seconds})
    assert finished is not None
    return AnswerReport(opened, before, finished, "".join(pieces), seed=params.sampling.seed)


def _line(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content, ensure_ascii=False) + "\n")
    sys.stdout.flush()

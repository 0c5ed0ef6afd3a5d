"""`compute-node generate`: continue a text, once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from compute_node.commands import options
from compute_node.commands.far_options import FAR
from compute_node.commands.opening import Opened, open_store
from compute_node.commands.report import REPORT_INDENT, AnswerReport, snapshot
from compute_node.engine.generate import Finished, GenerationParams
from compute_node.engine.route_recorder import RouteRecorder
from compute_node.text.tokenizer import Tokenizer
from tierd.client.source import StoreView
from tierd.errors import UsageError
from tierd.option_tables import Given, with_options
from tierd.terminal import show_hanging

__all__ = ["generate", "register"]

_MAX_PROMPT_BYTES = 16 << 20


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("generate")(generate)


@with_options(given=options.SAMPLING | options.MODEL | FAR)
def generate(
    store: options.Store,
    *,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", envvar="TIERD_NODE_PROMPT", help="Text to continue.")
    ] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="File with the text to continue.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this string. Repeatable.")] = None,
    given: Given,
    seed: options.Seed = None,
    config: options.Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end instead of text.")] = False,
    events: Annotated[bool, typer.Option("--events", help="JSON lines: start, token …, done.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.")] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Record here which experts were chosen, for tierd replay.")
    ] = None,
) -> None:
    """Continue a text; it comes from -p, -f or standard input. Statistics follow on standard error."""
    settings = options.load_settings(config, given, seed=seed)
    stops = [options.unicode_text(item, option="--stop") for item in stop or []]
    params = options.generation_params(settings, stop=stops, ignore_eos=ignore_eos)
    text = _prompt(prompt, file)
    console = Console(stderr=True, highlight=False)
    with open_store(store, settings, name="generate", console=console, check=_check) as opened:
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


def _prompt(prompt: str | None, file: Path | None) -> str:
    """The text to continue, as UTF-8 wherever it comes from."""
    if prompt is not None and file is not None:
        raise UsageError("give either -p or -f, not both")
    if prompt is not None:
        return options.unicode_text(prompt, option="-p")
    name = "standard input" if file is None else str(file)
    try:
        if file is None:
            if sys.stdin.isatty():
                sys.stderr.write("compute-node: type the text to continue; Ctrl-D ends it\n")
            data = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
        else:
            with file.open("rb") as content:
                data = content.read(_MAX_PROMPT_BYTES + 1)
        if len(data) > _MAX_PROMPT_BYTES:
            raise UsageError(f"{name}: a prompt of more than {_MAX_PROMPT_BYTES} bytes is refused")
        return data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8: byte {error.start}") from None


def _check(_store: StoreView, tokenizer: Tokenizer | None) -> None:
    if tokenizer is None:
        raise UsageError(
            "this store has no tokenizer.json, so it cannot continue text",
            hint="Put the model's tokenizer beside its weights, and convert it again.",
        )


def _answer(opened: Opened, text: str, params: GenerationParams, *, stream: bool, events: bool) -> AnswerReport:
    assert opened.tokenizer is not None
    prompt = opened.tokenizer.encode(text)
    before = snapshot(opened.source.stats)
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

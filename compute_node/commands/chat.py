"""`compute-node chat`: a conversation at the terminal; the KV cache is kept from turn to turn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from compute_node.commands import options
from compute_node.commands.conversation import Conversation
from compute_node.commands.far_options import FAR
from compute_node.commands.interruption import interruptible
from compute_node.commands.line_reader import LineReader
from compute_node.commands.opening import open_store
from compute_node.commands.report import REPORT_INDENT
from compute_node.commands.session_file import SessionFile
from compute_node.commands.typing_ahead import unechoed
from compute_node.text.chat_template import ChatTemplate
from compute_node.text.tokenizer import Tokenizer
from tierd.client.source import StoreView
from tierd.errors import UsageError
from tierd.option_tables import Given, with_options
from tierd.terminal import show_hanging

__all__ = ["chat", "register"]

_HELP = """\
  /reset   forget the conversation
  /stats   figures since the start
  /help    this text
  /quit    leave (or Ctrl-D)
  Three double quotes begin and end a message of several lines; pasted lines are one message anyway.
  Ctrl-C stops an answer."""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("chat")(chat)


@with_options(given=options.SAMPLING | options.MODEL | FAR)
def chat(
    store: options.Store,
    *,
    system: Annotated[str | None, typer.Option("--system", help="System message of the conversation.")] = None,
    session: Annotated[
        Path | None,
        typer.Option(
            "--session", metavar="FILE", help="Keep the conversation here, and go on with it where it is there already."
        ),
    ] = None,
    given: Given,
    seed: options.Seed = None,
    config: options.Config = None,
) -> None:
    """Talk with a model. Ctrl-C stops an answer; /help shows the commands."""
    settings = options.load_settings(config, given, seed=seed)
    params = options.generation_params(settings, stop=[], ignore_eos=False)
    console = Console(stderr=True, highlight=False)
    with open_store(store, settings, name="chat", console=console, check=_check) as opened:
        tokenizer, template = opened.tokenizer, ChatTemplate.from_store(opened.source.store)
        assert tokenizer is not None
        assert template is not None
        kept = None if session is None else SessionFile(session, opened.source.store.fingerprint)
        conversation = Conversation(opened, tokenizer, template, params, system=system, session=kept)
        _show(console, f"{opened.headline()} · /help")
        if conversation.resumed:
            _show(console, conversation.resumed)
        try:
            _talk(conversation, console)
        finally:
            if problem := conversation.keep_warm():
                _show(console, problem)


def _talk(conversation: Conversation, console: Console) -> None:
    """Turn by turn until the end of input or /quit."""
    reader = LineReader()
    while True:
        try:
            message = reader.message()
        except KeyboardInterrupt:
            _show(console, "(/quit or Ctrl-D leaves)")
            continue
        if message is None or message == "/quit":
            return
        _turn(conversation, message, console)


def _check(store: StoreView, tokenizer: Tokenizer | None) -> None:
    if tokenizer is None:
        raise UsageError(
            "this store has no tokenizer.json, so it cannot chat",
            hint="Put the model's tokenizer beside its weights, and convert it again.",
        )
    if ChatTemplate.from_store(store) is None:
        raise UsageError(
            "this model has no chat template: it was not made for conversations",
            hint="Use `compute-node generate` to let it continue a text.",
        )


def _turn(conversation: Conversation, line: str, console: Console) -> None:
    if line == "/help":
        _show(console, _HELP)
    elif line == "/reset":
        conversation.reset()
        _show(console, "the conversation is forgotten")
    elif line == "/stats":
        for text in conversation.totals():
            _show(console, text)
    elif line.startswith("/") and "\n" not in line:
        _show(console, f"{line.split(maxsplit=1)[0]} is not a command; /help shows them")
    elif line:
        try:
            with unechoed(), interruptible() as cancelled:
                report = conversation.answer(line, cancelled, _write)
        except UsageError as error:
            # The conversation goes on without this message: too long, or refused by the template.
            _show(console, str(error))
            return
        _write("\n")
        for text in report.lines():
            _show(console, text)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _show(console: Console, text: str) -> None:
    for line in text.splitlines():
        show_hanging(console, f"  {line.removeprefix('  ')}", indent=REPORT_INDENT, style="dim")

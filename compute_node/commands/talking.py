"""What `compute-node chat` does: it reads messages, shows answers, and keeps the conversation."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from compute_node.commands.applied_settings import generation_params
from compute_node.commands.conversation import Conversation
from compute_node.commands.interruption import interruptible
from compute_node.commands.line_reader import LineReader
from compute_node.commands.opening import open_store
from compute_node.commands.report import REPORT_INDENT
from compute_node.commands.session_file import SessionFile
from compute_node.commands.typing_ahead import unechoed
from compute_node.settings import NodeSettings
from compute_node.text.chat_template import ChatTemplate
from compute_node.text.tokenizer import Tokenizer
from tierd.client.private_daemon import PrivateDaemon
from tierd.client.source import StoreView
from tierd.errors import UsageError
from tierd.terminal import show_hanging

__all__ = ["talk"]

_HELP = """\
  /reset   forget the conversation
  /stats   figures since the start
  /help    this text
  /quit    leave (or Ctrl-D)
  Three double quotes begin and end a message of several lines; pasted lines are one message anyway.
  Ctrl-C stops an answer."""


def talk(
    store: str, settings: NodeSettings, *, daemon: PrivateDaemon | None, system: str | None, session: Path | None
) -> None:
    """Talks until the end of input or /quit.

    Args:
        store: as it was named.
        settings: of the node.
        daemon: that was begun for the store; see `open_store`.
        system: message that the conversation begins with; None: none.
        session: file that keeps the conversation; None: none.

    Raises:
        TierdError: of the store, the daemon, or the model.
    """
    params = generation_params(settings, stop=[], ignore_eos=False)
    console = Console(stderr=True, highlight=False)
    templates: list[ChatTemplate] = []

    def check(view: StoreView, tokenizer: Tokenizer | None) -> None:
        templates.append(_template(view, tokenizer))

    with open_store(store, settings, name="chat", daemon=daemon, console=console, check=check) as opened:
        assert opened.tokenizer is not None
        kept = None if session is None else SessionFile(session, opened.source.store.fingerprint)
        conversation = Conversation(opened, opened.tokenizer, templates[0], params, system=system, session=kept)
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


def _template(store: StoreView, tokenizer: Tokenizer | None) -> ChatTemplate:
    """The model's template; UsageError if it cannot chat."""
    if tokenizer is None:
        raise UsageError(
            "this store has no tokenizer.json, so it cannot chat",
            hint="Put the model's tokenizer beside its weights, and convert it again.",
        )
    template = ChatTemplate.from_store(store)
    if template is None:
        raise UsageError(
            "this model has no chat template: it was not made for conversations",
            hint="Use `compute-node generate` to let it continue a text.",
        )
    return template


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

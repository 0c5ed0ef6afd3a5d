"""`compute-node chat`: a conversation at the terminal; the KV cache is kept from turn to turn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console

from compute_node.commands import options
from compute_node.commands.interruption import interruptible
from compute_node.commands.opening import Opened, open_store
from compute_node.commands.report import AnswerReport, snapshot
from compute_node.engine.generate import Finished, GenerationParams
from compute_node.text.chat_template import ChatTemplate
from compute_node.text.tokenizer import Tokenizer
from tierd.errors import UsageError

__all__ = ["Conversation", "chat", "register"]

_HELP = """\
  /reset   forget the conversation
  /stats   figures since the start
  /help    this text
  /quit    leave (or Ctrl-D)
  Ctrl-C stops an answer."""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("chat")(chat)


def chat(
    store: options.Store,
    *,
    system: Annotated[str | None, typer.Option("--system", help="System message of the conversation.")] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.Penalty = None,
    seed: options.Seed = None,
    numerics: options.Numerics = None,
    engine: options.Engine = None,
    device: options.Device = None,
    vram: options.Vram = None,
    threads: options.Threads = None,
    context: options.Context = None,
    kv_cache: options.KVCacheBudget = None,
    in_process: options.InProcessFlag = None,
    arena: options.Arena = None,
    patience: options.Patience = None,
    messages: options.Messages = None,
    prefetch: options.Prefetch = None,
    config: options.Config = None,
) -> None:
    """Talk with a model. Ctrl-C stops an answer; /help shows the commands."""
    settings = options.load_settings(
        config,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        numerics=numerics,
        engine=engine,
        device=device,
        vram=vram,
        threads=threads,
        context=context,
        kv_cache=kv_cache,
        in_process=in_process,
        arena=arena,
        patience=patience,
        messages=messages,
        prefetch=prefetch,
    )
    params = options.generation_params(settings, stop=[], ignore_eos=False)
    console = Console(stderr=True, highlight=False)
    with open_store(store, settings, name="chat", console=console) as opened:
        tokenizer, template = _text_parts(opened)
        conversation = Conversation(opened, tokenizer, template, params, system=system)
        _show(console, f"{opened.headline()} · /help")
        while True:
            try:
                line = _read_line()
            except KeyboardInterrupt:
                _show(console, "(/quit or Ctrl-D leaves)")
                continue
            if line is None or line == "/quit":
                return
            _turn(conversation, line, console)


def _text_parts(opened: Opened) -> tuple[Tokenizer, ChatTemplate]:
    template = ChatTemplate.from_store(opened.source.store)
    if opened.tokenizer is None:
        raise UsageError("this store has no tokenizer.json, so it cannot chat")
    if template is None:
        raise UsageError(
            "this model has no chat template: it was not made for conversations",
            hint="Use `compute-node generate` to let it continue a text.",
        )
    return opened.tokenizer, template


def _read_line() -> str | None:
    """The next line, or None at the end of input."""
    if sys.stdin.isatty():
        try:
            return input("> ").strip()
        except EOFError:
            return None
    line = sys.stdin.buffer.readline()
    try:
        return line.decode("utf-8").strip() if line else None
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8: byte {error.start} of a line") from None


def _turn(conversation: Conversation, line: str, console: Console) -> None:
    if line == "/help":
        _show(console, _HELP)
    elif line == "/reset":
        conversation.reset()
        _show(console, "the conversation is forgotten")
    elif line == "/stats":
        for text in conversation.totals():
            _show(console, text)
    elif line.startswith("/"):
        _show(console, f"{line.split(maxsplit=1)[0]} is not a command; /help shows them")
    elif line:
        try:
            with interruptible() as cancelled:
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
    console.print(f"  {text}" if not text.startswith("  ") else text, style="dim", markup=False, soft_wrap=True)


class Conversation:
    """Messages so far and their place in the KV cache.

    Args:
        opened: model and source.
        tokenizer: of the store.
        template: renders the messages.
        params: of every answer.
        system: a first message, or None.
    """

    def __init__(
        self,
        opened: Opened,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        params: GenerationParams,
        *,
        system: str | None,
    ) -> None:
        self._opened = opened
        self._tokenizer = tokenizer
        self._template = template
        self._params = params
        self._first = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._first)
        self._sequence = opened.model.cache.take()
        self._answers = 0

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self.messages = list(self._first)
        self._opened.model.cache.keep_prefix(self._sequence, [])

    def answer(self, message: str, cancelled: Callable[[], bool], write: Callable[[str], None]) -> AnswerReport:
        """Answers a message, writing text as it comes.

        What the messages so far have in common with the KV cache is not computed again.

        Raises:
            UsageError: the template refuses the messages, or they do not fit the context; the message is forgotten.
        """
        asked = [*self.messages, {"role": "user", "content": message}]
        prompt = self._tokenizer.encode(self._template.render(asked), special_tokens=False)
        before = snapshot(self._opened.source.stats)
        pieces: list[str] = []
        finished: Finished | None = None
        for event in self._opened.generator.generate(
            prompt, self._params, sequence=self._sequence, cancelled=cancelled
        ):
            pieces.append(event.text)
            write(event.text)
            if isinstance(event, Finished):
                finished = event
        assert finished is not None
        text = "".join(pieces)
        self.messages = [*asked, {"role": "assistant", "content": text}]
        self._answers += 1
        return AnswerReport(self._opened, before, finished, text, seed=self._params.sampling.seed)

    def totals(self) -> list[str]:
        """Figures since the start, for people."""
        stats, times = self._opened.source.stats, self._opened.model.times
        outcomes = "   ".join(f"{count:,} {name}" for name, count in stats.outcomes.items())
        used, context = len(self._sequence.tokens), self._opened.model.context
        return [
            f"answers   {self._answers} · {used} of {context} tokens of context",
            f"experts   {self._opened.model.experts_chosen:,} asked   {outcomes}   {stats.repeated:,} fetched again",
            f"waited    {times.wait_seconds:.2f} s for experts, {times.compute_seconds:.2f} s computing",
        ]

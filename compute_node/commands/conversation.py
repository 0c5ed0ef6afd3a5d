"""A conversation with a model at the terminal: its messages, its place in the KV cache, and the file it is kept in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compute_node.commands.opening import Opened
from compute_node.commands.report import AnswerReport
from compute_node.commands.session_file import SessionFile
from compute_node.commands.warm_file import load_warm, save_warm
from compute_node.engine.arithmetic import named_numerics
from compute_node.engine.generate import Finished, GenerationParams
from compute_node.engine.kv_cache import KVCache
from compute_node.text.chat_template import ChatTemplate
from compute_node.text.tokenizer import Tokenizer
from tierd.errors import UsageError

__all__ = ["Conversation"]


class Conversation:
    """Messages so far and their place in the KV cache.

    Args:
        opened: model and source.
        tokenizer: of the store.
        template: renders the messages.
        params: of every answer.
        system: a first message, or None.
        session: where the conversation is kept, or None.

    Raises:
        UsageError: the session's file is not this model's, or began with another system message.
    """

    def __init__(
        self,
        opened: Opened,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        params: GenerationParams,
        *,
        system: str | None,
        session: SessionFile | None = None,
    ) -> None:
        self._opened = opened
        self._tokenizer = tokenizer
        self._template = template
        self._params = params
        self._first = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._first)
        self._session = session
        self._resumed = ""
        self._answers = 0
        if session is not None:
            self._resume(session)
        self._sequence = opened.model.cache.take()
        if session is not None and self._resumed:
            cache = opened.model.cache
            warm = isinstance(cache, KVCache) and load_warm(session.rows_path, cache, self._sequence, self._facts())
            tokens = f"{len(self._sequence.tokens)} tokens are warm" if warm else "the first answer computes it again"
            self._resumed += f"; {tokens}"

    @property
    def resumed(self) -> str:
        """What is gone on with, for people; empty for a new conversation."""
        return self._resumed

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self.messages = list(self._first)
        self._opened.model.cache.keep_prefix(self._sequence, [])
        self._save()

    def answer(self, message: str, cancelled: Callable[[], bool], write: Callable[[str], None]) -> AnswerReport:
        """Answers a message, writing text as it comes.

        What the messages so far have in common with the KV cache is not computed again.

        Raises:
            UsageError: the template refuses the messages, or they do not fit the context; the message is forgotten. Or
                the session cannot be written.
        """
        asked = [*self.messages, {"role": "user", "content": message}]
        prompt = self._tokenizer.encode(self._template.render(asked), special_tokens=False)
        before = self._opened.source.stats.snapshot()
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
        self._save()
        return AnswerReport(self._opened, before, finished, text, seed=self._params.sampling.seed)

    def keep_warm(self) -> str:
        """Writes the KV cache's rows beside the session's messages; returns what went wrong, or nothing."""
        cache = self._opened.model.cache
        if self._session is None or not self._sequence.tokens or not isinstance(cache, KVCache):
            return ""
        try:
            save_warm(self._session.rows_path, cache, self._sequence, self._facts())
        except OSError as error:
            return f"{self._session.rows_path} was not written ({error.strerror}): the next start computes it again"
        return ""

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

    def _resume(self, session: SessionFile) -> None:
        saved = session.load()
        if saved is None or not saved.messages:
            return
        began = saved.messages[:1] if saved.messages[0]["role"] == "system" else []
        if self._first and self._first != began:
            raise UsageError(
                f"--session {session.path} began with another system message",
                hint="Leave --system out to go on with it, or name another file.",
            )
        self._first, self.messages = began, saved.messages
        self._resumed = f"going on with {session.path}: {len(saved.messages)} messages, saved {saved.saved}"

    def _save(self) -> None:
        if self._session is not None:
            self._session.save(self.messages)

    def _facts(self) -> dict[str, Any]:
        """What must be the same for rows to be the bits that computing would give."""
        opened = self._opened
        return {
            "fingerprint": opened.source.store.fingerprint,
            "numerics": named_numerics(opened.model.numerics),
            "kernel_path": opened.kernel_path,
        }

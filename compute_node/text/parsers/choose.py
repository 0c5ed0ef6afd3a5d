"""Which parser an answer needs, as the model's own chat template tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from compute_node.text.parsers.deepseek import DEEPSEEK
from compute_node.text.parsers.dsml import DSML_V4, DSML_V32, MARK
from compute_node.text.parsers.forced import ForcedCall
from compute_node.text.parsers.glm import GLM
from compute_node.text.parsers.harmony import HARMONY, HarmonyParser
from compute_node.text.parsers.hermes import HERMES
from compute_node.text.parsers.kimi import KIMI
from compute_node.text.parsers.minimax import MINIMAX
from compute_node.text.parsers.mistral import MISTRAL
from compute_node.text.parsers.pieces import OutputParser, PlainText, Tools
from compute_node.text.parsers.qwen3_coder import QWEN3_CODER
from compute_node.text.parsers.style import Style
from compute_node.text.parsers.tagged import THINK, THOUGHT, TaggedParser

__all__ = ["AnswerForm"]

# The first mark that a template holds decides, so the more special ones come first.
_MARKS: Final = (
    ("<|channel|>", HARMONY),
    (MINIMAX.begin, MINIMAX),
    (KIMI.begin, KIMI),
    (DSML_V4.begin, DSML_V4),
    (MARK, DSML_V32),
    (DEEPSEEK.begin, DEEPSEEK),
    ("<arg_key>", GLM),
    ("<function=", QWEN3_CODER),
    (HERMES.begin, HERMES),
    (MISTRAL.begin, MISTRAL),
)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How a model writes thoughts and calls.

    Attributes:
        style: of tool calls; None if its template knows none.
        reasons: it may think between tags.
    """

    style: Style | None
    reasons: bool

    @classmethod
    def of_template(cls, source: str) -> AnswerForm:
        """As the marks in a template's source say."""
        style = next((style for mark, style in _MARKS if mark in source), None)
        return cls(style, THOUGHT in source and style is not HARMONY)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must be seen even where they are special tokens of the vocabulary."""
        thoughts = (THINK, THOUGHT) if self.reasons else ()
        return thoughts if self.style is None else (*thoughts, *self.style.markers)

    @property
    def own_messages(self) -> bool:
        """An answer is a row of messages, and only its parser can tell what of it is content."""
        return self.style is HARMONY

    def parser(self, prompt: str, tools: Tools, *, forced: bool = False, constrained: bool = False) -> OutputParser:
        """A parser for one answer.

        Args:
            prompt: the rendered conversation; it may have opened the thoughts.
            tools: that the request offers; empty: no call is looked for.
            forced: the answer is constrained to a call, see `forced_schema`.
            constrained: the answer is constrained, after the thoughts if the prompt has opened them.
        """
        thinking = self.thinking(prompt)
        if forced or constrained:
            inner: OutputParser = TaggedParser(None, {}, reasons=False, thinking=True) if thinking else PlainText()
            return ForcedCall(inner, tools) if forced else inner
        if self.own_messages:
            return HarmonyParser(tools)
        style = self.style if tools else None
        if style is None and not self.reasons:
            return PlainText()
        return TaggedParser(style, tools, reasons=self.reasons, thinking=thinking)

    def thinking(self, prompt: str) -> bool:
        """Whether a prompt leaves the model in the middle of its thoughts."""
        return self.reasons and prompt.rstrip().endswith(THINK)

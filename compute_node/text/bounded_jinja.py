"""Jinja in a sandbox that also bounds time and memory: a template comes with a model, and a model from anywhere.

The sandbox keeps a template from the interpreter's insides. What it leaves open are loops in loops and texts that
double: both are counted here, per rendering.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

__all__ = ["BoundedEnvironment"]

MAX_ROUNDS: Final = 1_000_000
"""Loop rounds and macro calls of one rendering."""
MAX_TEXT: Final = 16 << 20
"""Characters of a value, and of the whole text."""
_MAX_COPIED: Final = 1 << 34
"""Characters of all values that one rendering makes, most of which are thrown away: seconds of copying. A conversation
of thousands of messages, put together by adding to one text again and again, stays below it."""
_MAX_NUMBER: Final = 100_000
"""Largest number that a filter or a method of a text may be given; such numbers are widths and counts."""
_MAX_BITS: Final = 4096
_WIDTH: Final = re.compile(r"\d{5}|\*|\{[^{}]*\{")
"""Widths of more than four digits, and those that an argument gives."""


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's part for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates whose loops, texts and numbers are bounded; a broken bound is a TemplateError."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self._state = threading.local()
        self.filters = {name: self.bounded(function) for name, function in self.filters.items()}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """One rendering, from here to the end of the block."""
        self._state.rounds = self._state.copied = 0
        yield

    def bounded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose arguments and result are looked at."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            _check_arguments([*args[1:], *kwargs.values()])
            if function.__name__ == "do_format":
                _check_format(str(args[0]))
            return self._made(function(*args, **kwargs))

        return run

    def round_begins(self) -> str:
        """Called by every loop in every round, and by macros."""
        rounds = getattr(self._state, "rounds", 0) + 1
        self._state.rounds = rounds
        if rounds > MAX_ROUNDS:
            raise TemplateError(f"it goes round more than {MAX_ROUNDS} times")
        return ""

    def joined(self, *parts: Any) -> str:
        """The operator `~`."""
        texts = [str(part) for part in parts]
        if sum(map(len, texts)) > MAX_TEXT:
            raise _too_long()
        return str(self._made("".join(texts)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`+`, `*`, `**` and `%`, whose results may be far larger than what they are made of."""
        sizes = [len(value) for value in (left, right) if isinstance(value, (str, bytes, list, tuple))]
        numbers = [value for value in (left, right) if isinstance(value, int)]
        if operator == "*" and sizes and numbers and sizes[0] * max(0, numbers[0]) > MAX_TEXT:
            raise _too_long()
        if operator == "+" and sum(sizes) > MAX_TEXT:
            raise _too_long()
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        if len(numbers) == 2:
            bits = max(1, left.bit_length()) * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise TemplateError("it computes with too large numbers")
        return self._made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Any call. Methods of texts are the ones that can grow: `ljust`, `replace`, `join`, `format` and others."""
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _check_arguments([*args, *kwargs.values()])
        return self._made(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The method `format` of a text."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def _made(self, result: Any) -> Any:
        """A value that the template has had made."""
        if isinstance(result, str):
            if len(result) > MAX_TEXT:
                raise _too_long()
            self._state.copied = copied = getattr(self._state, "copied", 0) + len(result)
            if copied > _MAX_COPIED:
                raise TemplateError(f"it makes texts of more than {_MAX_COPIED} characters together")
        return result

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        changed: nodes.Template = _Counted(self).visit(tree)
        return changed


class _Counted(NodeTransformer):
    """Has loops and macros count their rounds, and `~` look at lengths."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        self._environment = environment

    def _counting(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("round_begins"), [], [], None, None)
        count = nodes.ExprStmt(call)
        count.set_lineno(node.lineno)
        count.set_environment(self._environment)
        node.body.insert(0, count)
        return node

    visit_For = visit_Macro = visit_CallBlock = _counting  # noqa: N815 - names that the base class looks for

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - same
        self.generic_visit(node)
        call = nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None)
        call.set_lineno(node.lineno)
        call.set_environment(self._environment)
        return call


def _check_arguments(arguments: list[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_NUMBER for value in arguments):
        raise TemplateError(f"it uses a width or count above {_MAX_NUMBER}")


def _check_format(form: str) -> None:
    if _WIDTH.search(form):
        raise TemplateError("it formats with a width that is too large or not written out")


def _too_long() -> TemplateError:
    return TemplateError(f"it makes a text of more than {MAX_TEXT} characters")

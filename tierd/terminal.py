"""How output fits where it goes: lines of a terminal's width on one, whole lines without trailing blanks in a pipe.

Text is UTF-8 end to end, whatever the locale says.
"""

from __future__ import annotations

import errno
import inspect
import io
import os
import shutil
import sys
import textwrap
from typing import Final, Literal

import typer
from rich.console import Console, RenderableType
from typer.models import CommandInfo, TyperInfo

__all__ = [
    "explain_unexpected",
    "help_style",
    "join_help_lines",
    "settle_streams",
    "show",
    "show_hanging",
    "wide_console",
]

_PIPE_WIDTH: Final = 200
_LEAST_WIDTH: Final = 40
_TABLES_WIDTH: Final = 80


def settle_streams() -> None:
    """Make standard output and errors hold any text; first of all in a program.

    What is no text, such as a file's name that is not UTF-8, is written with escapes. A descriptor that came closed is
    opened on nothing: otherwise the first file that is opened would get its number, and everything printed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def explain_unexpected(error: Exception) -> tuple[str, str]:
    """Message and hint for an error that no command foresaw: the system's word, or else a defect of the program."""
    if isinstance(error, OSError) and error.strerror:
        hint = "Allow more of them: ulimit -n, or LimitNOFILE= of its unit." if error.errno == errno.EMFILE else ""
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror, hint
    if isinstance(error, MemoryError):
        return "there is no memory left", ""
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return "no thread can be started", "See ulimit -u and -v, and TasksMax= and MemoryMax= of its unit."
    return (
        f"unexpected {type(error).__name__}: {error}",
        "This is a defect; --traceback before the command shows where.",
    )


def help_style() -> Literal["rich"] | None:
    """How typer shows help: in tables where the terminal has room for them, whose cells would lose their ends."""
    return "rich" if shutil.get_terminal_size().columns >= _TABLES_WIDTH else None


def wide_console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or wide enough in a pipe that no cell of a table is cut there."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Console(stderr=stderr, highlight=False, width=width)


def show(console: Console, content: RenderableType) -> None:
    """Print a table or text; in a pipe without the blanks that fill its lines up."""
    if console.is_terminal:
        console.print(content)
        return
    with console.capture() as captured:
        console.print(content)
    console.file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def show_hanging(console: Console, line: str, *, indent: int, style: str | None = None) -> None:
    """Print a line of text; where a terminal is too narrow for it, it goes on further in.

    Args:
        console: where to.
        line: without line breaks.
        indent: columns by which its other lines are set in.
        style: of the text.
    """
    if console.is_terminal:
        width = max(console.width, indent + _LEAST_WIDTH)
        line = textwrap.fill(
            line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        )
    console.print(line, style=style, markup=False, soft_wrap=True)


def join_help_lines(app: typer.Typer) -> None:
    """Let the help of all commands wrap at the terminal's width, and not where the docstrings' lines end as well."""
    documented: list[CommandInfo | TyperInfo] = [*app.registered_commands]
    if app.registered_callback is not None:
        documented.append(app.registered_callback)
    for command in documented:
        text = command.help or inspect.getdoc(command.callback) or ""
        command.help = "\n\n".join(" ".join(paragraph.splitlines()) for paragraph in text.split("\n\n"))
    for group in app.registered_groups:
        if group.typer_instance is not None:
            join_help_lines(group.typer_instance)

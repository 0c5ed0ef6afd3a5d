"""A program's commands by name alone: its help, and a word that is no command, need not wait for their imports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer

__all__ = ["add_outline", "words_of"]


def words_of(arguments: Sequence[str]) -> list[str]:
    """Which of a command line's arguments are no options, in order: the first ones name the command."""
    return [argument for argument in arguments if not argument.startswith("-")]


def add_outline(app: typer.Typer, commands: Mapping[str, str]) -> None:
    """Adds commands that say what they are for and do nothing.

    Args:
        app: that gets them.
        commands: by name the first paragraph of its help.
    """
    for name, summary in commands.items():
        app.command(name, help=summary)(_nothing)


def _nothing() -> None:
    """Stands for a command that is only listed."""

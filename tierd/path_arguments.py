"""Paths on the command line: an empty one, such as a shell's variable that was not set makes, is refused.

To Python it would be the working directory, which nobody means who writes it so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    import typer

__all__ = ["holds_path", "named_path", "refuse_empty_paths"]


def named_path(given: str | Path) -> Path:
    """The path that an argument names.

    Raises:
        PydanticCustomError: it is empty; typer shows it.
    """
    from pydantic_core import PydanticCustomError  # noqa: PLC0415 - help of all commands need not load it

    if not str(given):
        raise PydanticCustomError(
            "empty_path", "it is empty. Was a variable of the shell not set? The working directory is a dot."
        )
    return Path(given)


def holds_path(kind: Any) -> bool:
    """Whether a type is a path, or made of them."""
    return kind is Path or any(map(holds_path, get_args(kind)))


def refuse_empty_paths(app: typer.Typer) -> None:
    """Let all commands and groups of an application refuse them."""
    for command in app.registered_commands:
        if command.callback is not None:
            _refuse_in(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            refuse_empty_paths(group.typer_instance)


def _refuse_in(command: Callable[..., Any]) -> None:
    signature = inspect.signature(command, eval_str=True)
    for parameter in signature.parameters.values():
        kind, *described = get_args(parameter.annotation) or (parameter.annotation,)
        if holds_path(kind):
            for one in described:
                one.parser = named_path
    # What typer reads: annotations that are text would be made anew.
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in signature.parameters.values()}

"""Options that several commands share, or that are settings, stand once: in tables of a name and its annotation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["Given", "OptionTable", "with_options"]

OptionTable = dict[str, Any]
"""By the name of a setting, `Annotated[type | None, typer.Option(…)]`."""

Given = dict[str, Any]
"""By the name of a setting, what the command line gave, and None where it gave nothing."""


def with_options(**tables: OptionTable) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command some of whose keyword arguments stand for whole tables of options.

    Args:
        tables: by the name of such an argument, its options. Each is None unless it is given, and the command gets all
            of them as one `Given`; options that may be repeated become tuples there.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            if parameter.name not in tables:
                parameters.append(parameter)
                continue
            for name, annotation in tables[parameter.name].items():
                parameters.append(
                    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
                )

        @functools.wraps(command)
        def run(*arguments: Any, **options: Any) -> None:
            for name, table in tables.items():
                options[name] = {option: _value(options.pop(option, None)) for option in table}
            command(*arguments, **options)

        # What typer reads.
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _value(given: Any) -> Any:
    if isinstance(given, list):
        return tuple(given) or None
    return given

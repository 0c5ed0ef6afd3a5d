"""The `tierd` command. Exit codes: 0 done, 1 a problem found, 2 wrong use or refused input."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from typing import Annotated

import typer

from tierd import __version__
from tierd.errors import TierdError
from tierd.observe.logs import configure_logs
from tierd.terminal import explain_unexpected, join_help_lines, settle_streams

__all__ = ["COMMANDS", "build_app", "main"]

COMMANDS = (
    "serve",
    "plan",
    "convert",
    "inspect",
    "verify",
    "mirror",
    "scrub",
    "doctor",
    "tune",
    "stats",
    "top",
    "metrics",
    "ctl",
    "replay",
    "bench",
    "integrations",
    "fleet",
    "demo",
)
"""In the order of the help; each is a module of `tierd.commands` with a function `register`."""


def _root(
    *,
    version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False,
    with_traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    """Keep the experts of Mixture-of-Experts models on tiers, and serve them to compute nodes."""
    del with_traceback  # main() looks for it itself: it must know it even when parsing fails
    if version:
        print(f"tierd {__version__}")
        raise typer.Exit


def build_app(wanted: str = "") -> typer.Typer:
    """The command line; if `wanted` names a command, with that one alone: the others' imports take half a second."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    for name in [wanted] if wanted in COMMANDS else COMMANDS:
        import_module(f"tierd.commands.{name}").register(app)
    join_help_lines(app)
    return app


def main() -> None:
    """Run the command line; errors become one message and an exit code."""
    settle_streams()
    configure_logs("warning")  # on stderr: standard output is for answers. `serve` sets its own level.
    try:
        build_app(*sys.argv[1:2])(prog_name="tierd")
    except TierdError as error:
        _say(str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # noqa: BLE001 - the last resort: a defect is reported in one line
        message, hint = explain_unexpected(error)
        _say(f"{message}\n  {hint}" if hint else message)
        sys.exit(1)


def _say(text: str) -> None:
    if "--traceback" in sys.argv[1:]:
        traceback.print_exc()
    print(f"tierd: {text}", file=sys.stderr)

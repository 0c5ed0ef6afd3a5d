"""`compute-node`: the command line. Errors become a message with advice and an exit code, never a traceback."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import Annotated

import typer
from rich.console import Console
from typer.exceptions import TyperException

from tierd import __version__
from tierd.errors import TierdError
from tierd.terminal import explain_unexpected, join_help_lines, settle_streams

__all__ = ["build_app", "main"]

_INTERRUPTED = 130
_TERMINATED = 143


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"compute-node {__version__}\n")
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    with_traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    """Run MoE models whose experts are kept by tierd.

    Options that are settings can also be given as TIERD_NODE_OPTION in the environment (those of `worker` as
    TIERD_WORKER_OPTION), or in the table `node` (`api`, `worker`) of the file that --config names.
    """
    # main() looks for --traceback itself: it must know it even when parsing fails.
    del version, with_traceback


def build_app() -> typer.Typer:
    """The command line with all commands; imports the kernels, which takes about a second."""
    # See above; --version need not wait.
    from compute_node.commands import (  # noqa: PLC0415
        bench,
        chat,
        check_oracle,
        evaluate,
        families,
        fit_predictor,
        generate,
        metrics,
        serve,
        worker,
    )

    app = typer.Typer(
        name="compute-node",
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for command in (generate, chat, serve, metrics, check_oracle, families, evaluate, fit_predictor, worker, bench):
        command.register(app)
    join_help_lines(app)
    return app


def main(arguments: list[str] | None = None) -> None:
    """Runs a command and leaves with its exit code: 0 done, 1 a problem, 2 wrong use, 130 or 143 on a signal."""
    given = sys.argv[1:] if arguments is None else arguments
    settle_streams()
    # A polite end closes the session, and the private daemon with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    sys.exit(_run(given))


def _run(arguments: list[str]) -> int:
    show_traceback = "--traceback" in arguments
    try:
        code = _call(arguments)
    except TyperException as error:
        _say(error.format_message(), "compute-node --help shows the commands and their options.")
        code = 2
    except TierdError as error:
        if show_traceback:
            traceback.print_exc()
        _say(error.message, error.hint)
        code = error.exit_code
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone: nobody is left to tell. The final flush must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:  # noqa: BLE001 - the last resort: a defect is reported in one line
        if show_traceback:
            traceback.print_exc()
        _say(*explain_unexpected(error))
        return 1
    return code


def _call(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        sys.stdout.write(f"compute-node {__version__}\n")
        return 0
    code = build_app()(arguments, standalone_mode=False, prog_name="compute-node")
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _say(message: str, hint: str) -> None:
    console = Console(stderr=True, highlight=False)
    console.print(f"compute-node: {message}", style="red", markup=False, soft_wrap=True)
    if hint:
        console.print(f"  {hint}", markup=False, soft_wrap=True)

"""`compute-node`: the command line. Errors become a message with advice and an exit code, never a traceback."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from typer.exceptions import TyperException

from tierd import __version__
from tierd.errors import TierdError
from tierd.outline import add_outline, words_of
from tierd.path_arguments import refuse_empty_paths
from tierd.terminal import explain_unexpected, help_style, join_help_lines, settle_streams

__all__ = ["COMMANDS", "build_app", "main"]

COMMANDS: Final = {
    "generate": (
        "generate",
        "Continue a text; it comes from -p, -f or standard input. Statistics follow on standard error.",
    ),
    "chat": ("chat", "Talk with a model. Ctrl-C stops an answer; /help shows the commands."),
    "serve": (
        "serve",
        (
            "Serve a model: the APIs of OpenAI (/v1/chat/completions, /v1/completions) and Anthropic (/v1/messages), a "
            "chat page at /, and /metrics. Ctrl-C or SIGTERM stops it after the answers under way."
        ),
    ),
    "metrics": ("metrics", "Explain the metrics that a serving node shows at /metrics."),
    "check-oracle": (
        "check_oracle",
        "Convert a tiny checkpoint, run it with few experts in RAM, and compare with the reference beside it.",
    ),
    "families": (
        "families",
        "Show which model families run natively, and how far each is from the reference implementation.",
    ),
    "eval": ("evaluate", "Judge a store and its numerics: how well does the model predict a text?"),
    "fit-predictor": (
        "fit_predictor",
        "Fit, for each layer, a linear correction of its router's look-ahead on the texts of recorded runs.",
    ),
    "worker": (
        "worker",
        (
            "Compute with a store's experts for far nodes; they get one row for each token and expert, bit for bit "
            "their own."
        ),
    ),
    "bench": ("bench", "Measure this machine; figures of a busy machine are void, and say so."),
}
"""In the order of the help: modules of `compute_node.commands` with a function `register`, and the first paragraph of
each one's help."""

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


def build_app(wanted: Sequence[str] | None = None) -> typer.Typer:
    """The command line. Most commands import the kernels, which takes about a second.

    Args:
        wanted: words of a command, which is there alone; what is none: all are listed, and none is there; None: all
            are there.
    """
    app = typer.Typer(
        name="compute-node",
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        rich_markup_mode=help_style(),
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    if wanted is None:
        for command in COMMANDS:
            _module(command).register(app)
    elif wanted and wanted[0] == "bench":
        _module("bench").register(app, "".join(wanted[1:2]))
    elif wanted and wanted[0] in COMMANDS:
        _module(wanted[0]).register(app)
    else:
        add_outline(app, {command: summary for command, (_, summary) in COMMANDS.items()})
    join_help_lines(app)
    refuse_empty_paths(app)
    return app


def _module(command: str) -> Any:
    return import_module(f"compute_node.commands.{COMMANDS[command][0]}")


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
        command = next((word for word in words_of(arguments)[:1] if word in COMMANDS), "")
        _say(error.format_message(), f"See {' '.join(filter(None, ['compute-node', command, '--help']))}.")
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
    code = build_app(words_of(arguments))(arguments, standalone_mode=False, prog_name="compute-node")
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _say(message: str, hint: str) -> None:
    console = Console(stderr=True, highlight=False)
    console.print(f"compute-node: {message}", style="red", markup=False, soft_wrap=True)
    if hint:
        console.print(f"  {hint}", markup=False, soft_wrap=True)

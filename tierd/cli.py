"""The `tierd` command. Exit codes: 0 done, 1 a problem found, 2 wrong use or refused input."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from typing import Annotated, Final

import typer

from tierd import __version__
from tierd.errors import TierdError
from tierd.observe.logs import configure_logs
from tierd.outline import add_outline, words_of
from tierd.path_arguments import refuse_empty_paths
from tierd.terminal import explain_unexpected, help_style, join_help_lines, settle_streams

__all__ = ["COMMANDS", "build_app", "main"]

COMMANDS: Final = {
    "serve": "Serve a store's experts to compute nodes.",
    "plan": "Say what a model needs of disk and memory, what a daemon would do with RAM, and what that would bring.",
    "convert": "Convert a published checkpoint to a store.",
    "inspect": "Show family, geometry, formats, sizes and files of a store; weights are not read.",
    "verify": "Read every record, tensor and file of a store; exit 0 if all are right, 1 if not.",
    "scrub": "Read every record again at low priority; exit 0 if all are right, 1 if not.",
    "doctor": "Look at a store, its drives and mirrors, and this host; each finding comes with its remedy.",
    "tune": (
        "Try threads, drive reads, prefetch and arena sizes on a recorded run; keep what is faster by more than the "
        "noise."
    ),
    "stats": "Show what a running daemon has counted since it started.",
    "top": "Show what a running daemon does, again and again; in a pipe, one block of lines per look.",
    "metrics": "Explain the metrics that a daemon shows at /metrics.",
    "replay": "Run eviction policies over a recorded trace, with Belady's rule as the bound.",
    "demo": "Write text with a trained MoE model whose experts do not fit the arena, and show where they came from.",
    "mirror": "Plan, make and check copies of a store on other drives.",
    "ctl": "Change a running daemon, or look into it.",
    "bench": "Measure; the machine should be quiet meanwhile.",
    "integrations": "Experts for other people's model code.",
    "fleet": "Nodes and workers on a cluster of Ray; needs the extra `ray`.",
}
"""In the order of the help, with the first paragraph of each one's own; each is a module of `tierd.commands` with a
function `register`."""


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


def build_app(wanted: str | None = None) -> typer.Typer:
    """The command line. The imports of all commands take a second.

    Args:
        wanted: a command, which is there alone; what is none: all are listed, and none is there; None: all are there.
    """
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=help_style(),
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    if wanted is not None and wanted not in COMMANDS:
        add_outline(app, COMMANDS)
    else:
        for name in COMMANDS if wanted is None else [wanted]:
            import_module(f"tierd.commands.{name}").register(app)
    join_help_lines(app)
    refuse_empty_paths(app)
    return app


def main() -> None:
    """Run the command line; errors become one message and an exit code."""
    settle_streams()
    configure_logs("warning")  # on stderr: standard output is for answers. `serve` sets its own level.
    try:
        build_app(next(iter(words_of(sys.argv[1:])), ""))(prog_name="tierd")
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

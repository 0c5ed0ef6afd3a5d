"""`compute-node generate`: continue a text, once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from compute_node.commands import options
from compute_node.commands.far_options import FAR
from tierd.client.own_daemon import early_daemon
from tierd.errors import UsageError
from tierd.option_tables import Given, with_options

__all__ = ["generate", "register"]

_MAX_PROMPT_BYTES = 16 << 20


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("generate")(generate)


@with_options(given=options.SAMPLING | options.MODEL | FAR)
def generate(
    store: options.Store,
    *,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", envvar="TIERD_NODE_PROMPT", help="Text to continue.")
    ] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="File with the text to continue.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this string. Repeat it for more.")
    ] = None,
    given: Given,
    seed: options.Seed = None,
    config: options.Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end instead of text.")] = False,
    events: Annotated[bool, typer.Option("--events", help="JSON lines: start, token …, done.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.")] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Record here which experts were chosen, for tierd replay.")
    ] = None,
) -> None:
    """Continue a text; it comes from -p, -f or standard input. Statistics follow on standard error."""
    settings = options.load_settings(config, given, seed=seed)
    stops = [options.unicode_text(item, option="--stop") for item in stop or []]
    text = _prompt(prompt, file)
    with early_daemon(store, in_process=settings.in_process, arena=settings.arena) as daemon:
        # The kernels take a second to import, which --help need not wait for.
        from compute_node.commands.continuing import continue_text  # noqa: PLC0415

        continue_text(
            store,
            settings,
            text,
            stops,
            daemon=daemon,
            ignore_eos=ignore_eos,
            as_json=as_json,
            events=events,
            trace=trace,
        )


def _prompt(prompt: str | None, file: Path | None) -> str:
    """The text to continue, as UTF-8 wherever it comes from."""
    if prompt is not None and file is not None:
        raise UsageError("give either -p or -f, not both")
    if prompt is not None:
        return options.unicode_text(prompt, option="-p")
    name = "standard input" if file is None else str(file)
    try:
        if file is None:
            if sys.stdin.isatty():
                sys.stderr.write("compute-node: type the text to continue; Ctrl-D ends it\n")
            data = sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1)
        else:
            with file.open("rb") as content:
                data = content.read(_MAX_PROMPT_BYTES + 1)
        if len(data) > _MAX_PROMPT_BYTES:
            raise UsageError(f"{name}: a prompt of more than {_MAX_PROMPT_BYTES} bytes is refused")
        return data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8: byte {error.start}") from None

"""The command line shows every command, and loads only the one that is wanted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.main import get_command

from tierd import commands
from tierd.cli import COMMANDS, build_app


def test_every_module_with_a_command_is_listed():
    folder = Path(commands.__file__).parent
    registering = {path.stem for path in folder.glob("*.py") if "\ndef register(" in path.read_text()}
    assert set(COMMANDS) == registering
    assert set(get_command(build_app()).commands) == set(COMMANDS)
    assert set(get_command(build_app("unknown")).commands) == set(COMMANDS)


def test_one_command_alone_does_not_load_the_others():
    code = "import sys; from tierd.cli import build_app; build_app('stats'); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(run.stdout.split())
    assert "tierd.commands.stats" in loaded
    assert not loaded & {"tierd.commands.serve", "tierd.service.daemon", "tierd.checkpoint.convert", "uvicorn"}


def test_what_the_system_refuses_is_said_in_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "tierd", "stats", "x" * 300], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"tierd: {'x' * 300}: File name too long\n")


def test_any_text_can_be_printed_whatever_the_locale_and_whatever_came_closed():
    code = (
        "import os; from tierd.terminal import settle_streams; "
        "settle_streams(); print('\\u2713 \\udcff', os.open('/', 0))"
    )
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, code],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode() == "\u2713 \\udcff 3\n"

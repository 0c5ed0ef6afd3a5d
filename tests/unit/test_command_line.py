"""The command line shows every command, and loads only the one that is wanted."""

from __future__ import annotations

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

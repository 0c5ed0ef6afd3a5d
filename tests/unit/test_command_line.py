"""The command line shows every command, and loads only the one that is wanted."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.exceptions import TyperException
from typer.main import get_command
from typer.testing import CliRunner

import compute_node.cli
from tierd import commands
from tierd.cli import COMMANDS, build_app
from tierd.errors import UsageError


def test_every_module_with_a_command_is_listed():
    folder = Path(commands.__file__).parent
    registering = {path.stem for path in folder.glob("*.py") if "\ndef register(" in path.read_text()}
    assert set(COMMANDS) == registering


def explained(group):
    """What a group's help says of its commands."""
    return [(name, inspect.cleandoc(c.help).split("\n\n")[0].replace("\n", " ")) for name, c in group.commands.items()]


def test_the_outline_of_a_program_says_what_its_commands_say():
    assert explained(get_command(build_app())) == list(COMMANDS.items())
    assert explained(get_command(build_app("unknown"))) == list(COMMANDS.items())
    node = get_command(compute_node.cli.build_app())
    assert explained(node) == explained(get_command(compute_node.cli.build_app(["unknown"])))
    outline = get_command(compute_node.cli.build_app(["bench"])).commands["bench"]
    assert explained(node.commands["bench"]) == explained(outline)


def loaded(code):
    """Names of the modules that are there after some code."""
    code = f"import sys; {code}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(run.stdout.split())


def test_one_command_alone_does_not_load_the_others():
    found = loaded("from tierd.cli import build_app; build_app('stats')")
    assert "tierd.commands.stats" in found
    assert not found & {"tierd.commands.serve", "tierd.service.daemon", "tierd.checkpoint.convert", "uvicorn"}


def test_help_loads_no_command():
    found = loaded(
        "import tierd.cli, compute_node.cli; tierd.cli.build_app(''); compute_node.cli.build_app([]); "
        "compute_node.cli.build_app(['bench'])"
    )
    assert not found & {"tierd.commands.serve", "compute_node.commands.options", "numpy", "numba", "pydantic", "grpc"}


def test_help_of_commands_that_compute_loads_no_kernels():
    names = [name for name in compute_node.cli.COMMANDS if name != "bench"]
    found = loaded(f"import compute_node.cli; [compute_node.cli.build_app([name]) for name in {names}]")
    assert "compute_node.commands.evaluate" in found
    assert not found & {"compute_node.kernels", "numba", "torch"}


@pytest.mark.parametrize("columns", ["40", "60", "80", "200"])
def test_help_shows_whole_names_of_options_however_narrow_the_terminal_is(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    for app, command in ((build_app("serve"), "serve"), (compute_node.cli.build_app(["chat"]), "chat")):
        words = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": columns}).output
        names = [
            name for option in get_command(app).commands[command].params for name in option.opts if name[:2] == "--"
        ]
        assert len(names) > 10
        assert [name for name in names if name not in words and name != "--stop-at-eof"] == []


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


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "x", ""],
        ["convert", "", "x"],
        ["serve", "--also", "", "x"],
        ["serve", "--tls-cert", "", "x"],
        ["doctor", "--mirror", "", "x"],
        ["mirror", "stage", "x", ""],
        ["stats", ""],
        ["scrub", ""],
        ["mirror", "add", "", "x"],
        ["mirror", "add", "x", ""],
    ],
)
def test_an_empty_path_is_not_the_working_directory(words):
    with pytest.raises((TyperException, UsageError), match=r"is empty|names no directory"):
        build_app(words[0])(words, standalone_mode=False)


@pytest.mark.parametrize("words", [["generate", "", "-p", "x"], ["generate", "x", "--tls-ca", ""], ["eval", "", "x"]])
def test_an_empty_path_is_nothing_to_a_node_either(words):
    with pytest.raises((TyperException, UsageError), match="is empty"):
        compute_node.cli.build_app(words)(words, standalone_mode=False)

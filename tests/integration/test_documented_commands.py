"""The command lines of the README, typed into bash: the programs understand every word, and get what was meant."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import typer

from tierd.cli import build_app

README = Path(__file__).parents[2] / "README.md"


def documented():
    """Every line of the README's code blocks that starts tierd."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("tierd ")]


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """Run each line in bash with a program in tierd's place; returns the words that it got, by line."""
    folder = tmp_path_factory.mktemp("typed")
    program = folder / "tierd"
    note = f"open({str(folder / 'words')!r}, 'a').write(json.dumps(sys.argv[1:]) + chr(10))"
    program.write_text(f"#!{sys.executable}\nimport json, sys\n{note}\n")
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    found = {}
    for line in documented():
        (folder / "words").write_text("")
        script = f"set -eu\n{line}\nwait\n"
        subprocess.run(["bash", "-c", script], env=environment, cwd=folder, check=True, timeout=30)
        (words,) = (folder / "words").read_text().splitlines()
        found[line] = json.loads(words)
    return found


@cache
def whole_command():
    return typer.main.get_command(build_app())


def parse(words):
    """What the real command line makes of these words, without running anything."""
    command, rest, path = whole_command(), list(words), []
    while rest and rest[0] in getattr(command, "commands", {}):
        path.append(rest.pop(0))
        command = command.commands[path[-1]]
    return path, command.make_context(path[-1], rest).params


def test_every_documented_command_is_understood(typed):
    assert len(typed) > 8
    paths = {" ".join(parse(words)[0]) for words in typed.values()}
    assert {
        "serve",
        "doctor",
        "mirror plan",
        "mirror stage",
        "mirror verify",
        "mirror add",
        "scrub",
        "bench drives",
    } <= paths


def test_every_mirror_that_is_typed_reaches_the_daemon(typed):
    (serving,) = [
        parse(words)[1] for line, words in typed.items() if line.startswith("tierd serve") and "--mirror" in line
    ]
    assert serving["mirror"] == ["/ssd2/qwen3", "/ssd3/qwen3=0.5"]
    (doctor,) = [
        parse(words)[1] for line, words in typed.items() if line.startswith("tierd doctor") and "--mirror" in line
    ]
    assert doctor["mirror"] == [Path("/ssd2/qwen3")]

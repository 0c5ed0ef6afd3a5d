"""What is typed while an answer is written is not seen within it, and not lost."""

from __future__ import annotations

import io
import os
import pty
import select
import sys
import termios

from compute_node.commands.typing_ahead import unechoed


def echoes(terminal):
    return bool(termios.tcgetattr(terminal)[3] & termios.ECHO)


def test_a_terminal_shows_nothing_of_it_and_keeps_it(monkeypatch):
    person, terminal = pty.openpty()
    with open(terminal, closefd=False) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with unechoed():
            assert not echoes(terminal)
            os.write(person, b"and then?\n")
            assert select.select([terminal], [], [], 60)[0]
        assert echoes(terminal)
        assert stdin.readline() == "and then?\n"
    os.write(person, b"x\n")
    assert os.read(person, 100) == b"x\r\n", "the first line was never echoed"
    os.close(person)
    os.close(terminal)


def test_without_a_terminal_it_changes_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("text"))
    with unechoed():
        assert sys.stdin.read() == "text"

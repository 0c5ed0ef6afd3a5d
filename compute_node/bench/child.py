"""Processes of a measurement that runs in several at once."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tierd.errors import DaemonUnavailable

__all__ = ["Child"]


class Child:
    """A process that is asked in lines on its standard input, and answers in lines.

    Args:
        name: for messages.
        command: its words.
        log: file for its standard error.
    """

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self._name = name
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def wait_for(self, word: str) -> str:
        """Read lines until one holds the word, and return it; DaemonUnavailable if the process ends before."""
        while word not in (line := self._line()):
            pass
        return line

    def say(self, line: str) -> None:
        """Say a line, and do not wait."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next line that it says, as JSON; DaemonUnavailable if it ended."""
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def ask(self, line: str) -> dict[str, Any]:
        """Say a line and return the answer."""
        self.say(line)
        return self.answer()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def kill(self) -> None:
        """End it without a farewell."""
        self._process.kill()
        self._process.wait()

    def core_seconds(self) -> float:
        """Processor time that it has used so far (proc(5))."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Let it end by itself, or else kill it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            words = self._log.read_text(errors="replace").strip()[-2000:]
            raise DaemonUnavailable(f"the {self._name} of the measurement ended: {words or 'it said nothing'}")
        return line

"""One program of a fleet as a child process: started, heard, looked at, ended."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tierd.addresses import Address, parse_address

__all__ = ["REFUSED", "Program"]

REFUSED: Final = 2
"""Exit code of a program that was told something that cannot be: starting it again would not help."""

_LEASH: Final = Path(__file__).with_name("leash.py")
_GREETING: Final = re.compile(r"^(?:listening on |serving .* on http://)(\S+)$")
_KEPT_LINES: Final = 40
_MAX_LINE: Final = 4096


class Program:
    """Runs from its making until it ends; it dies with the thread that made it.

    Args:
        words: of the command line, the program's path first.
        environment: on top of this process's own.
    """

    def __init__(self, words: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._address: Address | None = None
        leash = [sys.executable, "-I", "-S", str(_LEASH), str(os.getpid()), *words]
        self._process = subprocess.Popen(
            leash,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        self._listener = threading.Thread(target=self._listen, name="tierd-fleet-listener", daemon=True)
        self._listener.start()

    def __repr__(self) -> str:
        return f"<Program {self.pid}, {self._address or 'starting'}>"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def address(self) -> Address | None:
        """Where it listens; None until it says so."""
        return self._address

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus a signal's number if that ended it."""
        return self._process.poll()

    @property
    def last_words(self) -> str:
        """The end of what it said."""
        return "\n".join(self._said)

    def wait(self, seconds: float) -> int | None:
        """Its exit code, or None if it still runs after so long; with that, all it said has been heard."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._listener.join(seconds)
        return code

    def end(self, seconds: float) -> None:
        """Ask it to end, and after so long end it; harmless when it has ended."""
        if self._process.poll() is None:
            self._process.terminate()
        if self.wait(seconds) is None:
            self._process.kill()
            self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as said:
            while line := said.readline(_MAX_LINE):
                text = line.decode("utf-8", "replace").rstrip()
                self._said.append(text)
                found = _GREETING.match(text)
                if found is not None and self._address is None:
                    with contextlib.suppress(Exception):  # whatever it said is no address then
                        self._address = parse_address(found[1], option="address")
                # For Ray's logs.
                print(text, flush=True)

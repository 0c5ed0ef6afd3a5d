"""A daemon of one's own: started for a store's directory, stopped with the process that wanted it."""

from __future__ import annotations

import atexit
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tierd.addresses import Address
from tierd.errors import DaemonUnavailable, TierdError, UsageError

__all__ = ["PrivateDaemon"]

_START_SECONDS = 60.0
_STOP_SECONDS = 15.0
_MAX_LOG_BYTES = 4096
_REFUSED = 2
_GREETING = b"\nlistening on "


class PrivateDaemon:
    """`tierd serve` as a child process on a socket of its own. It ends with this process, however that ends.

    Args:
        store: directory of a store.
        options: further options of `tierd serve`.
        wait: until it serves; otherwise `wait_until_up` must be called before anybody connects.

    Raises:
        UsageError: the daemon refused the store or an option; its message is passed on.
        DaemonUnavailable: it did not start.
    """

    def __init__(self, store: Path, *options: str, wait: bool = True) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tierd-"))
        self.address = Address(path=self._folder / f"{secrets.token_hex(4)}.sock")
        self._log = self._folder / "daemon.log"
        command = [sys.executable, "-m", "tierd", "serve", str(store), "--listen", str(self.address), *options]
        command.append("--stop-at-eof")
        try:
            with self._log.open("wb") as log:
                # A group of its own: Ctrl-C in the terminal must end the answer, not the daemon under it.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
                )
        except BaseException:  # Ctrl-C as well: a child that was made already ends with its pipe
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        atexit.register(self.stop)
        if wait:
            self.wait_until_up()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def gone(self) -> str | None:
        """Why the daemon has ended, or None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            name = signal.Signals(-code).name
            memory = "; the kernel log names memory if that was the cause" if -code == signal.SIGKILL else ""
            return f"the private daemon was killed (signal {-code}, {name}){memory}"
        return f"the private daemon ended with exit code {code}: {self._last_words()}"

    def stop(self) -> None:
        """Stop the daemon gracefully, within a bound; harmless when it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        atexit.unregister(self.stop)
        shutil.rmtree(self._folder, ignore_errors=True)

    def wait_until_up(self) -> None:
        """Return when it serves; harmless when it does already. A daemon that cannot is stopped.

        Raises:
            UsageError: it refused the store or an option; its message is passed on.
            DaemonUnavailable: it ended, or did not serve within a bound.
        """
        try:
            self._wait_until_up()
        except BaseException:
            self.stop()
            raise

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None:
                raise self._failed_start()
            if time.monotonic() > deadline:
                raise DaemonUnavailable(
                    f"the private daemon did not start within {_START_SECONDS:g} s: {self._last_words()}"
                )
            time.sleep(0.01)

    def _answers(self) -> bool:
        # Its socket is there before the daemon knows whether it can start; its greeting comes when it serves.
        return _GREETING in self._log.read_bytes()

    def _failed_start(self) -> TierdError:
        words = self._last_words()
        message = words.removeprefix("tierd: ") or self.gone() or ""
        return UsageError(message) if self._process.returncode == _REFUSED else DaemonUnavailable(message)

    def _last_words(self) -> str:
        try:
            return self._log.read_bytes()[-_MAX_LOG_BYTES:].decode("utf-8", "replace").strip()
        except OSError:
            return ""

"""Telling systemd that the daemon is up, alive, or stopping: the protocol of sd_notify(3), without a library."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

__all__ = ["Notifier"]


class Notifier:
    """Sends datagrams to the socket that systemd names in the environment; without one it does nothing.

    Attributes:
        watchdog_seconds: between two signs of life, half of what systemd waits; None if it does not wait.
    """

    def __init__(self) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_seconds = self._interval()

    def _interval(self) -> float | None:
        if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
            return None
        text = os.environ.get("WATCHDOG_USEC", "")
        return int(text) / 2e6 if text.isdecimal() and int(text) and self._address else None

    def send(self, *lines: str) -> None:
        """Send one message, such as `READY=1`; that nobody listens is no error."""
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            out.setblocking(False)
            out.sendto("\n".join(lines).encode(), self._address)

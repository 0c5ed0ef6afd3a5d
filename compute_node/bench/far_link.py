"""Two network namespaces on this machine, joined by a link of a given speed: as good as two hosts, for measuring."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from types import TracebackType
from typing import Final, Self

from tierd.errors import UsageError

__all__ = ["NODE_LINK", "STORE_HOST", "FarLink"]

STORE_HOST: Final = "10.213.77.1"
_NODE_HOST: Final = "10.213.77.2"
NODE_LINK: Final = "tierd-node"
"""The node's end of the link, in its namespace."""
_STORE_LINK: Final = "tierd-store"
_SECONDS: Final = 20.0


class FarLink:
    """A namespace for the store's side and one for the node's, with a shaped pair of virtual devices between them.

    Both directions are shaped by a token bucket (tc-tbf(8)).

    Args:
        bits_per_second: of the link, each way.

    Raises:
        UsageError: this needs root, and the programs `ip` and `tc`; says what went wrong.
    """

    def __init__(self, bits_per_second: int) -> None:
        self._store, self._node = (f"tierd-{os.getpid()}-{side}" for side in ("store", "node"))
        try:
            self._make(bits_per_second)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def beside_store(self, *module: str) -> list[str]:
        """A command that runs a Python module with arguments on the store's side."""
        return ["ip", "netns", "exec", self._store, sys.executable, "-m", *module]

    def beside_node(self, *module: str) -> list[str]:
        """The same on the node's side."""
        return ["ip", "netns", "exec", self._node, sys.executable, "-m", *module]

    def close(self) -> None:
        """Take both namespaces away, and what is left in them. Harmless when repeated."""
        for name in (self._store, self._node):
            with contextlib.suppress(UsageError):
                _run("ip", "netns", "delete", name)

    def _make(self, bits_per_second: int) -> None:
        for name in (self._store, self._node):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run(
            "ip", "-n", self._store, "link", "add", _STORE_LINK, "type", "veth", "peer", NODE_LINK, "netns", self._node
        )
        for name, device, host in (
            (self._store, _STORE_LINK, STORE_HOST),
            (self._node, NODE_LINK, _NODE_HOST),
        ):
            _run("ip", "-n", name, "address", "add", f"{host}/30", "dev", device)
            _run("ip", "-n", name, "link", "set", device, "up")
            _run(
                "tc", "-n", name, "qdisc", "add", "dev", device, "root",
                "tbf", "rate", f"{bits_per_second}bit", "burst", "256kb", "latency", "50ms",
            )  # fmt: skip


def _run(*command: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"{command[0]} cannot be run: {error}", hint="Install iproute2, and run this as root."
        ) from None
    if done.returncode:
        raise UsageError(
            f"two network namespaces are needed, and `{' '.join(command)}` failed: {done.stderr.strip()}",
            hint="Run this as root, in a container with CAP_NET_ADMIN and CAP_SYS_ADMIN.",
        )

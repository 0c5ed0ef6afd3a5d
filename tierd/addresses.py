"""How a daemon is named: `unix:PATH` or `HOST:PORT`, the same in every command."""

from __future__ import annotations

import ipaddress
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tierd.errors import UsageError

__all__ = ["Address", "default_socket", "parse_address", "runtime_directory"]

_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
# struct sockaddr_un holds 108 bytes with the final zero (unix(7)).
_MAX_SOCKET_PATH = 107


@dataclass(frozen=True, slots=True)
class Address:
    """Where a daemon listens: a Unix socket's path, or a host and port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path is not None else f"{self._bracketed()}:{self.port}"

    @property
    def target(self) -> str:
        """The name that gRPC uses for it."""
        return f"unix:{self.path}" if self.path is not None else f"{self._bracketed()}:{self.port}"

    @property
    def local(self) -> bool:
        """True if only processes of this host can reach it."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def _bracketed(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def parse_address(text: str, *, option: str) -> Address:
    """`unix:PATH` or `HOST:PORT` (IPv6 in brackets).

    Raises:
        UsageError: naming `option`, if the text is neither.
    """
    if text.startswith("unix:"):
        path = Path(text[len("unix:") :]).expanduser().absolute()
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            raise UsageError(
                f"{option}: the socket path {path} is longer than the {_MAX_SOCKET_PATH} bytes that Linux allows",
                hint="Choose a shorter path.",
            )
        return Address(path=path)
    match = _HOST_PORT.fullmatch(text)
    if match is None or not int(match[2]) <= 65535:
        raise UsageError(f"{option}: {text!r} is neither unix:PATH nor HOST:PORT")
    return Address(host=match[1].strip("[]"), port=int(match[2]))


def runtime_directory() -> Path:
    """The folder for sockets: `$XDG_RUNTIME_DIR/tierd`, else a folder of this user under the temporary directory."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "tierd" if base else Path(tempfile.gettempdir()) / f"tierd-{os.getuid()}"


def default_socket(store: Path) -> Address:
    """The socket of a store's daemon where none is named: the store's folder name under `runtime_directory`."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", store.absolute().name)[:48] or "store"
    return Address(path=runtime_directory() / f"{name}.sock")

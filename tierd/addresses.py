"""How a daemon is named: `unix:PATH` or `HOST:PORT`, the same in every command; several to connect to, too."""

from __future__ import annotations

import ipaddress
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tierd.errors import DaemonUnavailable, UsageError

__all__ = ["MAX_SOCKET_PATH", "Address", "default_socket", "parse_address", "parse_target", "runtime_directory"]

_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path: struct sockaddr_un holds 108 with the final zero (unix(7))."""

_DNS = "dns:///"
_LISTS = {"ipv4": 4, "ipv6": 6}
_MOST_LISTED = 64
_MAX_ADDRESS_FILE = 1024


@dataclass(frozen=True, slots=True)
class Address:
    """Where a daemon listens: a Unix socket's path, or a host and port. To connect to, also one of the last two.

    Attributes:
        path: of a Unix socket.
        host: name or number.
        port: of the host.
        several: equals, of which gRPC's resolver finds out and among which it spreads calls: `dns:///NAME:PORT`,
            `ipv4:HOST:PORT,HOST:PORT`, `ipv6:[HOST]:PORT,…`.
        file: holds the address, which may change; see `now`.
    """

    path: Path | None = None
    host: str = ""
    port: int = 0
    several: str = ""
    file: Path | None = None

    def __str__(self) -> str:
        return f"@{self.file}" if self.file is not None else self.target

    @property
    def target(self) -> str:
        """The name that gRPC uses for it."""
        if self.several:
            return self.several
        return f"unix:{self.path}" if self.path is not None else f"{self._bracketed()}:{self.port}"

    @property
    def name(self) -> str:
        """The same wherever its file lies."""
        return f"@{self.file.name}" if self.file is not None else str(self)

    @property
    def local(self) -> bool:
        """True if only processes of this host can reach it."""
        if self.several:
            return all(address.local for address in _listed(self.several))
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def now(self) -> Address:
        """The address to connect to: what its file holds at present, or itself.

        Raises:
            DaemonUnavailable: the file cannot be read, or holds no address.
        """
        if self.file is None:
            return self
        try:
            with self.file.open(encoding="ascii") as file:
                return parse_target(file.read(_MAX_ADDRESS_FILE).strip(), option=str(self))
        except (OSError, UnicodeDecodeError) as error:
            raise DaemonUnavailable(f"{self.file} tells no address: {error}") from error
        except UsageError as error:
            raise DaemonUnavailable(f"{self.file} tells no address: {error.message}") from error

    def _bracketed(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def parse_address(text: str, *, option: str) -> Address:
    """`unix:PATH` or `HOST:PORT` (IPv6 in brackets).

    Raises:
        UsageError: naming `option`, if the text is neither.
    """
    if text.startswith("unix:") and text != "unix:":
        try:
            path = Path(text[len("unix:") :]).expanduser().absolute()
        except RuntimeError as error:  # there is no such user
            raise UsageError(f"{option}: {text!r}: {error}") from None
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise UsageError(
                f"{option}: the socket path {path} is longer than the {MAX_SOCKET_PATH} bytes that Linux allows",
                hint="Choose a shorter path.",
            )
        return Address(path=path)
    match = _HOST_PORT.fullmatch(text)
    if match is None or not int(match[2]) <= 65535:
        raise UsageError(f"{option}: {text!r} is neither unix:PATH nor HOST:PORT")
    return Address(host=match[1].strip("[]"), port=int(match[2]))


def parse_target(text: str, *, option: str) -> Address:
    """An address to connect to: `unix:PATH`, `HOST:PORT`, or several equals in one of gRPC's own forms, or `@FILE`.

    Raises:
        UsageError: naming `option`, if the text is none of these.
    """
    scheme, _, rest = text.partition(":")
    if text.startswith("@") and len(text) > 1:
        return Address(file=Path(text[1:]).expanduser().absolute())
    if text.startswith(_DNS):
        _one(text[len(_DNS) :], text, option)
        return Address(several=text)
    if scheme not in _LISTS:
        return parse_address(text, option=option)
    parts = [_one(part, text, option) for part in rest.split(",")]
    if len(parts) > _MOST_LISTED or not all(_version(part.host) == _LISTS[scheme] for part in parts):
        raise UsageError(
            f"{option}: {text!r} must list 1 to {_MOST_LISTED} numeric addresses",
            hint="Such as ipv4:10.0.0.1:9470,10.0.0.2:9470, or dns:///NAME:PORT for a name.",
        )
    return Address(several=text)


def _one(text: str, whole: str, option: str) -> Address:
    address = None if text.startswith("unix:") else parse_address(text, option=f"{option} {whole}")
    if address is None or address.port == 0:
        raise UsageError(f"{option}: {whole!r} must name HOST:PORT")
    return address


def _listed(several: str) -> list[Address]:
    parts = several.removeprefix(_DNS) if several.startswith(_DNS) else several.partition(":")[2]
    return [parse_address(part, option="an address") for part in parts.split(",")]


def _version(host: str) -> int:
    try:
        return ipaddress.ip_address(host).version
    except ValueError:
        return 0


def runtime_directory() -> Path:
    """The folder for sockets: `$XDG_RUNTIME_DIR/tierd`, else a folder of this user under the temporary directory."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "tierd" if base else Path(tempfile.gettempdir()) / f"tierd-{os.getuid()}"


def default_socket(store: Path) -> Address:
    """The socket of a store's daemon where none is named: the store's folder name under `runtime_directory`."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", store.absolute().name)[:48] or "store"
    return Address(path=runtime_directory() / f"{name}.sock")

"""How people name a running daemon."""

from __future__ import annotations

from pathlib import Path

from tierd.addresses import Address, default_socket, parse_address
from tierd.errors import DaemonUnavailable, UsageError

__all__ = ["daemon_address"]


def daemon_address(name: str, *, option: str) -> Address:
    """The address behind `unix:PATH`, `HOST:PORT`, or the directory of a store whose daemon listens where it does by
    default.

    Raises:
        UsageError: it is nothing of the kind.
        DaemonUnavailable: nobody listens on the socket.
    """
    if not name:
        raise UsageError(f"{option} is empty", hint="Name a store's directory, unix:PATH, or HOST:PORT of a daemon.")
    directory = Path(name)
    if directory.is_dir():
        address = default_socket(directory)
        if address.path is not None and not address.path.exists():
            raise DaemonUnavailable(
                f"no daemon serves {name}: there is no socket {address.path}",
                hint=f"Start one: tierd serve {name}. One with another --listen is named by its address: unix:PATH.",
            )
        return address
    if ":" not in name:
        raise UsageError(
            f"{option}: {name} is no directory", hint="Name a store's directory, unix:PATH, or HOST:PORT of a daemon."
        )
    address = parse_address(name, option=option)
    if address.path is not None and not address.path.exists():
        raise DaemonUnavailable(f"no daemon listens at {address}: there is no such socket")
    return address

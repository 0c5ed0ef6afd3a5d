"""The daemon that a store's directory gets where none serves it: it may begin before its node is ready to connect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierd.addresses import default_socket
from tierd.client.private_daemon import PrivateDaemon

__all__ = ["begin_daemon", "early_daemon"]


def begin_daemon(directory: Path, arena: str | None) -> PrivateDaemon:
    """A private daemon of a store that has just begun; `wait_until_up` waits for it.

    Args:
        directory: of the store.
        arena: RAM for experts; None: the daemon's default.
    """
    options = ["--http", "off", "--log-level", "warning", *([] if arena is None else ["--arena", arena])]
    return PrivateDaemon(directory, *options, wait=False)


@contextmanager
def early_daemon(store: str, *, in_process: bool, arena: str | None) -> Iterator[PrivateDaemon | None]:
    """Begins the daemon that `open_source` would start, for a caller that has a second of imports before that.

    It is stopped at the end, also where it was never waited for.

    Args:
        store: as it was named.
        in_process: no daemon is wanted.
        arena: RAM for experts of a daemon of one's own; None: where a daemon listens for the store, that one is used.

    Yields:
        The daemon, for `open_source`; None where none will be needed, or where only an attempt to connect can tell.
    """
    directory = Path(store)
    if in_process or not store or not directory.is_dir() or (arena is None and _listens(directory)):
        yield None
        return
    daemon = begin_daemon(directory, arena)
    try:
        yield daemon
    finally:
        daemon.stop()


def _listens(directory: Path) -> bool:
    socket = default_socket(directory).path
    return socket is not None and socket.exists()

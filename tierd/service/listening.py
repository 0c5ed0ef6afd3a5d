"""Where the daemon may listen: this host only, until it can prove who is asking."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import grpc.aio

from tierd.addresses import Address
from tierd.errors import UsageError

__all__ = ["Listener", "check_local"]


def check_local(address: Address, *, option: str) -> None:
    """Refuse an address that other hosts could reach.

    Raises:
        UsageError: the address is neither a Unix socket nor loopback.
    """
    if not address.local:
        raise UsageError(
            f"{option}: refusing to listen on {address}: anyone on the network could read the model "
            "and fill the daemon's queues",
            hint="Listen on unix:PATH, 127.0.0.1:PORT or [::1]:PORT.",
        )


class Listener:
    """A bound address; for a Unix socket also the lock that keeps a second daemon away from it."""

    def __init__(self, address: Address, lock: int | None = None) -> None:
        self.address = address
        self._lock = lock

    @classmethod
    def bind(cls, server: grpc.aio.Server, address: Address) -> Listener:
        """Bind the gRPC server. A Unix socket gets mode 0600, in a folder that others cannot write to.

        Raises:
            UsageError: the address is not local, another daemon is there, or the folder cannot be used.
        """
        check_local(address, option="--listen")
        if address.path is None:
            try:
                port = server.add_insecure_port(address.target)
            except RuntimeError as error:
                raise UsageError(f"--listen: cannot listen on {address}: {error}", hint="Is the port taken?") from error
            return cls(Address(host=address.host, port=port))
        _prepare_folder(address.path.parent)
        lock = _lock(address.path)
        mask = os.umask(0o177)
        try:
            server.add_insecure_port(address.target)
        except RuntimeError as error:
            os.close(lock)
            raise UsageError(f"--listen: cannot listen on {address}: {error}") from error
        finally:
            os.umask(mask)
        return cls(address, lock)

    def close(self) -> None:
        """Let another daemon have the socket."""
        if self._lock is not None:
            # gRPC removes the socket of a server that ran, not of one that never started.
            if self.address.path is not None:
                self.address.path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def _prepare_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode
    except OSError as error:
        raise UsageError(f"--listen: cannot use the folder {folder} for a socket: {error}") from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise UsageError(
            f"--listen: others may write to {folder}, so they could put a socket of their own there",
            hint=f"Run: chmod 700 {folder}",
        )


def _lock(path: Path) -> int:
    """A lock file says whether the socket is in use: gRPC would silently take over one that is."""
    lock_path = path.with_name(path.name + ".lock")
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UsageError(f"--listen: cannot write {lock_path}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise UsageError(
            f"--listen: another daemon listens on unix:{path}", hint="Stop it first, or name another socket."
        ) from error
    return lock

"""Where servers may listen: on this host only, unless those who ask are known and nobody can listen in."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc.aio

from tierd.addresses import Address
from tierd.certificates import Certificates
from tierd.errors import UsageError

__all__ = ["Listener", "Protection", "check_local"]

_LOCK_TRIES: Final = 10
_PID_DIGITS: Final = 20


@dataclass(frozen=True, slots=True)
class Protection:
    """What stands between a listening address and the rest of the world.

    Attributes:
        certificate: PEM file of the server's certificate and those that it hangs on.
        key: PEM file of its key.
        client_ca: PEM file of the authorities whose certificates clients must have; None: they need none.
        token_file: tokens, one of which every call must show; see `tierd.door`.
        insecure: listen beyond this host without any of it.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    token_file: Path | None = None
    insecure: bool = False

    def certificates(self) -> Certificates | None:
        """The certificates; None without any.

        Raises:
            UsageError: they are not whole, or cannot be used.
        """
        if self.certificate is None and self.key is None and self.client_ca is None:
            return None
        if self.certificate is None or self.key is None:
            raise UsageError("--tls-cert and --tls-key go together, and --tls-client-ca with both")
        return Certificates(self.certificate, self.key, self.client_ca)

    def check(self, address: Address) -> None:
        """Refuse an address that other hosts can reach, unless it is protected.

        Raises:
            UsageError: what is missing.
        """
        if address.local or self.insecure:
            return
        lacking = [
            option
            for option, given in (("--tls-cert", self.certificate), ("--token-file", self.token_file))
            if given is None
        ]
        if lacking:
            raise UsageError(
                f"--listen: refusing to listen on {address} without {' and '.join(lacking)}: anyone on the network "
                "could read the model and fill the queues",
                hint="Give --tls-cert, --tls-key and --token-file, listen on unix:PATH or 127.0.0.1:PORT, or say "
                "--insecure if the network is yours alone.",
            )


NO_PROTECTION = Protection()


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

    def __init__(self, address: Address, lock: int | None = None, certificates: Certificates | None = None) -> None:
        self.address = address
        self._lock = lock
        self._certificates = certificates  # gRPC asks them at every handshake

    @classmethod
    def bind(cls, server: grpc.aio.Server, address: Address, protection: Protection = NO_PROTECTION) -> Listener:
        """Bind the gRPC server. A Unix socket gets mode 0600, in a folder that others cannot write to.

        Raises:
            UsageError: the address is not protected, another daemon is there, or the folder cannot be used.
        """
        protection.check(address)
        if address.path is None:
            certificates = protection.certificates()
            try:
                if certificates is None:
                    port = server.add_insecure_port(address.target)
                else:
                    port = server.add_secure_port(address.target, certificates.credentials())
            except RuntimeError as error:
                raise UsageError(f"--listen: cannot listen on {address}: {error}", hint="Is the port taken?") from error
            return cls(Address(host=address.host, port=port), certificates=certificates)
        _prepare_folder(address.path.parent)
        lock = _lock(address.path)
        mask = os.umask(0o177)
        try:
            server.add_insecure_port(address.target)
        except RuntimeError as error:
            _lock_path(address.path).unlink(missing_ok=True)
            os.close(lock)
            if address.path.exists() and not address.path.is_socket():
                raise UsageError(
                    f"--listen: {address.path} is there already, and no socket", hint="Name another path."
                ) from error
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
                # While it is locked: whoever waits for it sees that it is gone, and makes a new one.
                _lock_path(self.address.path).unlink(missing_ok=True)
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
    lock_path = _lock_path(path)
    for _ in range(_LOCK_TRIES):
        try:
            lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UsageError(f"--listen: cannot write {lock_path}: {error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(lock, _PID_DIGITS, 0).decode("ascii", "replace").strip()
            os.close(lock)
            who = f"another daemon (process {holder})" if holder.isdigit() else "another daemon"
            raise UsageError(
                f"--listen: {who} listens on unix:{path}", hint="Stop it first, or name another socket."
            ) from error
        if _is_still(lock, lock_path):
            _sign(lock)
            return lock
        os.close(lock)
    raise UsageError(f"--listen: other daemons begin and end at unix:{path} all the time", hint="Name another socket.")


def _sign(lock: int) -> None:
    """Say whose it is: the socket may have been removed while its daemon runs."""
    with contextlib.suppress(OSError):  # a full drive: the lock holds all the same
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _is_still(lock: int, path: Path) -> bool:
    """Whether a locked file is the one of that name: a daemon that ended meanwhile has removed its own."""
    try:
        return os.path.samestat(os.fstat(lock), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False

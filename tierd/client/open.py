"""From the STORE that people name to the source of its experts: a directory, `unix:PATH`, or `HOST:PORT`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from tierd.addresses import Address, default_socket, parse_target
from tierd.client.arena_source import ArenaSource
from tierd.client.far import FarOptions, open_far
from tierd.client.in_process import InProcess
from tierd.client.loop_thread import LoopThread
from tierd.client.own_daemon import begin_daemon
from tierd.client.private_daemon import PrivateDaemon
from tierd.client.remote_store import RemoteStore
from tierd.client.source import ExpertSource
from tierd.errors import ArenaError, DaemonUnavailable, TierdError, UsageError
from tierd.sizes import parse_share
from tierd.store.store import ExpertStore

__all__ = ["FarOptions", "open_source"]


def open_source(
    store: str,
    *,
    name: str,
    numerics: str,
    kernel_path: str,
    in_process: bool = False,
    arena: str | None = None,
    patience: float = 60.0,
    messages: bool = False,
    far: FarOptions | None = None,
    daemon: PrivateDaemon | None = None,
    tell: Callable[[str], None] | None = None,
) -> ExpertSource:
    """The experts of STORE.

    Args:
        store: a directory (its daemon, where one listens on the default socket and `arena` is None; else a private
            daemon is started, and stopped by `close`), `unix:PATH`, `HOST:PORT`, or several daemons of one store, see
            `tierd.addresses.Address`.
        name: this node's name, for operators.
        numerics: of the node's kernels.
        kernel_path: of the node's kernels.
        in_process: read the directory without a daemon.
        arena: RAM for experts, an amount or a share: of a private daemon of a directory, or of a far node itself; a
            daemon that runs already has its own.
        patience: seconds to wait for a daemon that went away.
        messages: ask the daemon for every expert, instead of using those in its arena without a message.
        far: for daemons of other hosts.
        daemon: of `early_daemon`, for this directory and arena; None: what a directory needs is started here.
        tell: takes lines for people; the default prints them on stderr.

    Raises:
        UsageError: STORE is nothing of the kind, or the options do not go together.
        DaemonUnavailable: nobody answers there.
    """
    say = tell if tell is not None else _say
    far = far or FarOptions()
    far.check()
    if not store:
        raise UsageError("STORE is empty", hint="Name a store's directory, unix:PATH, or HOST:PORT of a daemon.")
    node = _Node(name=name, numerics=numerics, kernel_path=kernel_path, patience=patience, messages=messages, tell=say)
    directory = Path(store)
    if directory.is_dir():
        if far.workers or far.experts in ("bytes", "worker"):
            option = "--worker" if far.workers else f"--experts {far.experts}"
            raise UsageError(f"{option} goes with the address of a daemon, not with a directory")
        opened = ExpertStore.open(directory)
        if in_process:
            whole = opened.geometry.experts_total * opened.geometry.slot_bytes
            return InProcess(
                opened, budget=None if arena is None else parse_share(arena, whole=whole, option="--arena")
            )
        return _open_directory(directory, opened, arena, node, daemon)
    if not store.startswith("@") and ":" not in store:
        raise UsageError(
            f"STORE: {store} is no directory", hint="Name a store's directory, unix:PATH, or HOST:PORT of a daemon."
        )
    address = parse_target(store, option="STORE").now()
    if in_process:
        raise UsageError(f"--in-process goes with a store's directory, not with the daemon at {address}")
    loop = LoopThread.shared()
    if _near(address, far):
        try:
            return _open_arena(address, far, arena, node, loop)
        except _OutOfReach as error:
            if address.path is not None or far.experts == "arena":
                raise error.why from error
            # A port of this host may be the end of a tunnel.
            say(f"{error.why.message}; so experts come as bytes")
    return open_far(
        address,
        far,
        name=name,
        numerics=numerics,
        kernel_path=kernel_path,
        arena=arena,
        patience=patience,
        loop=loop,
        tell=say,
    )


class _Node(TypedDict):
    """What sources are told of the node; see `open_source`."""

    name: str
    numerics: str
    kernel_path: str
    patience: float
    messages: bool
    tell: Callable[[str], None]


def _open_directory(
    directory: Path, store: ExpertStore, arena: str | None, node: _Node, daemon: PrivateDaemon | None
) -> ArenaSource:
    """From the daemon that serves the directory already, unless an arena is asked for; else from one of our own."""
    address = default_socket(directory)
    if address.path is not None and address.path.exists():
        if arena is None and daemon is None:
            # Another store of that name, a daemon of somebody else, a socket that was left behind: not this one.
            with contextlib.suppress(TierdError):
                source = ArenaSource(address, store, **node)
                node["tell"](
                    f"tierd at {address} serves this store: its memory is used (--arena starts another daemon)"
                )
                return source
        elif arena is not None:
            node["tell"](f"--arena starts a daemon of its own, beside tierd at {address}")
    if daemon is None:
        daemon = begin_daemon(directory, arena)
    try:
        daemon.wait_until_up()
        return _OwnDaemonSource(daemon, store, node)
    except BaseException:
        daemon.stop()
        raise


def _near(address: Address, far: FarOptions) -> bool:
    """Whether to map the daemon's memory."""
    if address.several and far.experts == "arena":
        raise UsageError(f"--experts arena goes with the address of one daemon, not with {address}")
    alone = address.local and not address.several
    return far.experts == "arena" or (far.experts == "auto" and not far.workers and alone)


class _OutOfReach(Exception):
    """The daemon answers, but its memory cannot be mapped from here."""

    def __init__(self, why: ArenaError | DaemonUnavailable) -> None:
        super().__init__(why.message)
        self.why = why


def _open_arena(address: Address, far: FarOptions, arena: str | None, node: _Node, loop: LoopThread) -> ArenaSource:
    store = RemoteStore(address, loop, far.access)
    if arena is not None:
        raise UsageError(
            f"--arena goes with a store's directory, or with --experts bytes; the daemon at {address} has its own"
        )
    try:
        return ArenaSource(address, store, access=far.access, loop=loop, **node)
    except (ArenaError, DaemonUnavailable) as error:
        raise _OutOfReach(error) from error


class _OwnDaemonSource(ArenaSource):
    """Experts from a daemon that ends with the source."""

    def __init__(self, daemon: PrivateDaemon, store: ExpertStore, node: _Node) -> None:
        super().__init__(daemon.address, store, gone=daemon.gone, **node)
        self.daemon = daemon

    def close(self) -> None:
        """End the session, then the daemon."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.daemon.stop)
            super().close()


def _say(line: str) -> None:
    print(f"compute-node: {line}", file=sys.stderr, flush=True)

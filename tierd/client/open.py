"""From the STORE that people name to the source of its experts: a directory, `unix:PATH`, or `HOST:PORT`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from tierd.addresses import parse_address
from tierd.client.arena_source import ArenaSource
from tierd.client.in_process import InProcess
from tierd.client.loop_thread import LoopThread
from tierd.client.private_daemon import PrivateDaemon
from tierd.client.remote_store import RemoteStore
from tierd.client.source import ExpertSource
from tierd.errors import UsageError
from tierd.sizes import parse_share
from tierd.store.store import ExpertStore

__all__ = ["open_source"]


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
    tell: Callable[[str], None] | None = None,
) -> ExpertSource:
    """The experts of STORE.

    Args:
        store: a directory (a private daemon is started, and stopped by `close`), `unix:PATH`, or `HOST:PORT`.
        name: this node's name, for operators.
        numerics: of the node's kernels.
        kernel_path: of the node's kernels.
        in_process: read the directory without a daemon.
        arena: RAM for experts, an amount or a share; for a directory only, a running daemon has its own.
        patience: seconds to wait for a daemon that went away.
        messages: ask the daemon for every expert, instead of using those in its arena without a message.
        tell: takes lines for people; the default prints them on stderr.

    Raises:
        UsageError: STORE is nothing of the kind, or the options do not go together.
        DaemonUnavailable: nobody answers there.
    """
    say = tell if tell is not None else _say
    directory = Path(store)
    if directory.is_dir():
        opened = ExpertStore.open(directory)
        if in_process:
            whole = opened.geometry.experts_total * opened.geometry.slot_bytes
            return InProcess(
                opened, budget=None if arena is None else parse_share(arena, whole=whole, option="--arena")
            )
        options = ["--http", "off", "--log-level", "warning"]
        daemon = PrivateDaemon(directory, *options, *([] if arena is None else ["--arena", arena]))
        try:
            return _OwnDaemonSource(
                daemon,
                opened,
                name=name,
                numerics=numerics,
                kernel_path=kernel_path,
                patience=patience,
                messages=messages,
                tell=say,
            )
        except BaseException:
            daemon.stop()
            raise
    if not store.startswith("unix:") and ":" not in store:
        raise UsageError(
            f"STORE: {store} is no directory", hint="Name a store's directory, unix:PATH, or HOST:PORT of a daemon."
        )
    address = parse_address(store, option="STORE")
    if in_process or arena is not None:
        option = "--in-process" if in_process else "--arena"
        raise UsageError(f"{option} goes with a store's directory, not with the daemon at {address}")
    loop = LoopThread.shared()
    return ArenaSource(
        address,
        RemoteStore(address, loop),
        name=name,
        numerics=numerics,
        kernel_path=kernel_path,
        patience=patience,
        messages=messages,
        loop=loop,
        tell=say,
    )


class _OwnDaemonSource(ArenaSource):
    """Experts from a daemon that ends with the source."""

    def __init__(
        self,
        daemon: PrivateDaemon,
        store: ExpertStore,
        *,
        name: str,
        numerics: str,
        kernel_path: str,
        patience: float,
        messages: bool,
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(
            daemon.address,
            store,
            name=name,
            numerics=numerics,
            kernel_path=kernel_path,
            patience=patience,
            messages=messages,
            tell=tell,
            gone=daemon.gone,
        )
        self.daemon = daemon

    def close(self) -> None:
        """End the session, then the daemon."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.daemon.stop)
            super().close()


def _say(line: str) -> None:
    print(f"compute-node: {line}", file=sys.stderr, flush=True)

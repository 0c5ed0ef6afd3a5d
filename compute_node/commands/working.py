"""What `compute-node worker` does: it opens the store, listens, and computes until it is told to stop."""

from __future__ import annotations

import sys
from contextlib import closing

from compute_node.engine.arithmetic import named_numerics
from compute_node.engine.kernel_path import kernel_path
from compute_node.settings import WorkerSettings
from compute_node.worker.expert_work import ExpertWork
from compute_node.worker.service import WorkerIdentity
from compute_node.worker.worker import Worker
from tierd.access import Access
from tierd.addresses import parse_address
from tierd.client.open import FarOptions, open_source
from tierd.client.private_daemon import PrivateDaemon
from tierd.listening import Protection
from tierd.stopping import stopped_by_signals

__all__ = ["run_worker"]


def run_worker(store: str, settings: WorkerSettings, daemon: PrivateDaemon | None) -> None:
    """Computes for nodes until a signal comes.

    Args:
        store: as it was named.
        settings: of the worker, with an address to listen on.
        daemon: that was begun for the store; see `open_source`.

    Raises:
        UsageError: an address that cannot be used; TierdError of the store or the daemon.
    """
    address = parse_address(settings.listen, option="--listen")
    protection = Protection(
        certificate=settings.tls_cert,
        key=settings.tls_key,
        client_ca=settings.tls_client_ca,
        token_file=settings.token_file,
        insecure=settings.insecure,
    )
    protection.check(address)
    path, numerics = kernel_path(), named_numerics(settings.numerics)
    source = open_source(
        store,
        name="worker",
        numerics=numerics,
        kernel_path=path,
        in_process=settings.in_process,
        arena=settings.arena,
        patience=settings.patience,
        far=FarOptions(access=Access(ca=settings.tls_ca, token_file=settings.token_file, name=settings.tls_name)),
        daemon=daemon,
        tell=_say,
    )
    with (
        closing(source),
        closing(ExpertWork(source, numerics=settings.numerics, threads=settings.threads, rows=settings.rows)) as work,
    ):
        identity = WorkerIdentity(source.store.fingerprint, numerics, path)
        with (
            Worker(address, protection, identity, work, max_nodes=settings.max_nodes, tell=_say) as running,
            stopped_by_signals(running.stop),
        ):
            sys.stdout.write(
                f"worker · store {identity.fingerprint[:12]} · {settings.numerics} · {work.threads} threads ({path})\n"
                f"listening on {running.address}\n"
            )
            sys.stdout.flush()
            running.run()


def _say(line: str) -> None:
    print(f"compute-node worker: {line}", file=sys.stderr, flush=True)

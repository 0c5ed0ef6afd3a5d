"""`compute-node worker`: compute with experts beside their store, for nodes that are far from it."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Final

import typer

from compute_node.commands import options
from compute_node.commands.far_options import TlsCa, TlsName
from compute_node.engine.arithmetic import named_numerics
from compute_node.engine.kernel_path import kernel_path
from compute_node.settings import WorkerSettings
from compute_node.worker.expert_work import ExpertWork
from compute_node.worker.service import WorkerIdentity
from compute_node.worker.worker import Worker
from tierd.access import Access
from tierd.addresses import parse_address
from tierd.client.open import FarOptions, open_source
from tierd.errors import UsageError
from tierd.listening import Protection
from tierd.option_tables import Given, OptionTable, with_options
from tierd.stopping import stopped_by_signals

__all__ = ["OPTIONS", "register", "worker"]


OPTIONS: Final[OptionTable] = {
    "listen": Annotated[str | None, typer.Option("--listen", help="Where nodes connect: HOST:PORT or unix:PATH.")],
    "tls_cert": Annotated[
        Path | None, typer.Option("--tls-cert", metavar="FILE", help="Its certificate (PEM); read again on change.")
    ],
    "tls_key": Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="The certificate's key (PEM).")],
    "tls_client_ca": Annotated[
        Path | None,
        typer.Option("--tls-client-ca", metavar="FILE", help="Nodes must have a certificate of these (PEM)."),
    ],
    "token_file": Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="Nodes must show one of these tokens, one a line."),
    ],
    "tls_ca": TlsCa,
    "tls_name": TlsName,
    "insecure": Annotated[
        bool | None, typer.Option("--insecure", help="Listen beyond this host without TLS and tokens.")
    ],
    "max_nodes": Annotated[int | None, typer.Option("--max-nodes", help="Nodes at once. Default: 64.")],
    "rows": Annotated[int | None, typer.Option("--rows", help="Most tokens of one request. Default: 64.")],
    "numerics": options.Numerics,
    "threads": options.Threads,
    "in_process": options.InProcessFlag,
    "arena": options.Arena,
    "patience": options.MODEL["patience"],
}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("worker")(worker)


@with_options(given=OPTIONS)
def worker(
    store: options.Store,
    *,
    given: Given,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file; its table `worker` gives defaults.")
    ] = None,
) -> None:
    """Compute with a store's experts for far nodes; they get one row for each token and expert, bit for bit their own.

    It wants to be on the daemon's host, where it reads experts in the daemon's memory as a node does.
    """
    settings = WorkerSettings.load(config=config, table="worker", flags=given)
    if not settings.listen:
        raise UsageError("a worker needs an address", hint="Such as --listen 127.0.0.1:9470.")
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

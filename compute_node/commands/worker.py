"""`compute-node worker`: compute with experts beside their store, for nodes that are far from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from compute_node.commands import options
from compute_node.commands.far_options import TlsCa, TlsName
from compute_node.kernel_choice import force_kernels
from compute_node.settings import WorkerSettings
from tierd.client.own_daemon import early_daemon
from tierd.errors import UsageError
from tierd.option_tables import Given, OptionTable, with_options

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
    "kernels": options.Kernels,
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
    force_kernels(settings.kernels)
    with early_daemon(store, in_process=settings.in_process, arena=settings.arena) as daemon:
        # The kernels take a second to import, which --help need not wait for.
        from compute_node.commands.working import run_worker  # noqa: PLC0415

        run_worker(store, settings, daemon)

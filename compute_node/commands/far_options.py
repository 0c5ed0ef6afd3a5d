"""Options of nodes whose daemon is on another host, and what they become."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from tierd.option_tables import OptionTable

__all__ = ["FAR", "TlsCa", "TlsName"]

TlsCa = Annotated[
    Path | None,
    typer.Option("--tls-ca", metavar="FILE", help="Authorities of far daemons' certificates (PEM). Default: gRPC's."),
]
TlsName = Annotated[
    str | None,
    typer.Option("--tls-name", metavar="NAME", help="That these certificates must have. Default: the host's."),
]

FAR: Final[OptionTable] = {
    "experts": Annotated[
        str | None,
        typer.Option(
            "--experts",
            help="How experts come from a daemon: arena (its memory, on one host), bytes (fetched), worker (computed "
            "beside their store), or auto. Default: auto.",
        ),
    ],
    "worker": Annotated[
        list[str] | None,
        typer.Option(
            "--worker",
            metavar="HOST:PORT",
            help="A worker of a far daemon's store. Repeat it for more, with their shares: HOST:PORT=WEIGHT.",
        ),
    ],
    "worker_seconds": Annotated[
        float | None,
        typer.Option("--worker-seconds", help="After so long another worker is asked, or the bytes. Default: 2."),
    ],
    "store_cache": Annotated[
        str | None,
        typer.Option("--store-cache", help="Disk for what is fetched of far stores; 0 for none. Default: 16GiB."),
    ],
    "tls_ca": TlsCa,
    "tls_name": TlsName,
    "tls_client_cert": Annotated[
        Path | None, typer.Option("--tls-client-cert", metavar="FILE", help="This node's own certificate (PEM).")
    ],
    "tls_client_key": Annotated[Path | None, typer.Option("--tls-client-key", metavar="FILE", help="Its key (PEM).")],
    "token_file": Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="Token that is shown to far daemons and workers."),
    ],
    "plaintext": Annotated[
        bool | None, typer.Option("--plaintext", help="Speak with far daemons and workers without TLS.")
    ],
}
"""How a node meets daemons and workers of other hosts."""

"""`tierd serve STORE`: run the daemon."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import structlog
import typer
import uvloop

from tierd.errors import UsageError
from tierd.observe.logs import configure_logs
from tierd.option_tables import Given, OptionTable, with_options
from tierd.profiles import load_profile
from tierd.service.daemon import Daemon, Running
from tierd.settings import ProfileMode, ServeSettings
from tierd.sizes import format_bytes, format_count, format_share
from tierd.store.store import ExpertStore

__all__ = ["OPTIONS", "register"]

_SWITCH_SECONDS = 0.0001

_log = structlog.get_logger()


OPTIONS: Final[OptionTable] = {
    "listen": Annotated[
        str | None,
        typer.Option(
            help="Where nodes connect: unix:PATH or HOST:PORT; beyond this host with TLS and a token. Default: a "
            "socket per store."
        ),
    ],
    "tls_cert": Annotated[
        Path | None, typer.Option(metavar="FILE", help="The daemon's certificate (PEM); read again when it changes.")
    ],
    "tls_key": Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's key (PEM).")],
    "tls_client_ca": Annotated[
        Path | None, typer.Option(metavar="FILE", help="Nodes must have a certificate of these authorities (PEM).")
    ],
    "token_file": Annotated[
        Path | None, typer.Option(metavar="FILE", help="Nodes must show one of these tokens, one a line.")
    ],
    "insecure": Annotated[
        bool | None, typer.Option("--insecure", help="Listen beyond this host without TLS and tokens.")
    ],
    "reflection": Annotated[
        bool | None, typer.Option("--reflection", help="Let clients ask which calls there are (gRPC reflection).")
    ],
    "local": Annotated[
        str | None,
        typer.Option(
            help="unix:PATH where this host's nodes and operators connect, if --listen is for others, too. Default: a "
            "socket per store."
        ),
    ],
    "http": Annotated[
        str | None, typer.Option(help="Where the page, /metrics and health answer, or `off`. Default: 127.0.0.1:9480.")
    ],
    "arena": Annotated[
        str | None, typer.Option(help="RAM for expert bytes: 96GiB, or 25% of the model's experts. Default: 25%.")
    ],
    "ram": Annotated[
        str | None,
        typer.Option(
            help="RAM of the whole daemon, instead of --arena: 96GiB, 75% of what this process may have, or auto; "
            "`tierd plan` explains the sum. With --arena, too, the smaller one counts."
        ),
    ],
    "arena_dir": Annotated[
        Path | None, typer.Option(help="tmpfs directory for the arena. Default: anonymous shared memory.")
    ],
    "policy": Annotated[str | None, typer.Option(help="Who leaves RAM. Default: expected-frequency.")],
    "mirror": Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR[=WEIGHT]",
            help="A directory with copies of all or some shards, best on a drive of its own. Repeat it for more. "
            "WEIGHT is the share of the drive's measured bandwidth to count on.",
        ),
    ],
    "also": Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Where shards lie that STORE itself lacks. Repeat it for more."),
    ],
    "drive_threads": Annotated[
        int | None, typer.Option(help="Reads in flight per drive. Default: what a short measurement finds best.")
    ],
    "direct": Annotated[
        bool | None, typer.Option("--direct/--no-direct", help="Read past the page cache. Default: yes.")
    ],
    "profile": Annotated[
        str | None,
        typer.Option(help="auto (default) uses what `tierd tune` found, where nothing else is said; off does not."),
    ],
    "fault_plan": Annotated[
        Path | None, typer.Option(help="Damage reads on purpose as this file says. For tests only.")
    ],
    "prefetch": Annotated[
        str | None,
        typer.Option(help="Read what nodes hint at: off, on, or auto, as far as it shortens waits. Default: auto."),
    ],
    "guess": Annotated[
        str | None,
        typer.Option(
            help="Guess what nodes without hints will ask for: off, on, or auto, while it pays. Default: off."
        ),
    ],
    "history": Annotated[
        str | None,
        typer.Option(help="Usage history, which warms the next start: on, read (never written) or off. Default: on."),
    ],
    "state_dir": Annotated[
        Path | None,
        typer.Option(help="Where the history lies. Default: STORE.state beside the store, else the user's state."),
    ],
    "pin": Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Experts to keep in RAM: lines of a layer and its experts. Default: none."),
    ],
    "deadline_seconds": Annotated[
        float | None, typer.Option(help="Bound on an answer where the node names none. Default: 60.")
    ],
    "drain_seconds": Annotated[float | None, typer.Option(help="Bound on a graceful stop. Default: 10.")],
    "max_sessions": Annotated[int | None, typer.Option(help="Compute nodes at once. Default: 64.")],
    "session_experts": Annotated[
        int | None, typer.Option(help="Experts that one node may hold at once because it asked. Default: what fits.")
    ],
    "session_read_bytes": Annotated[
        str | None,
        typer.Option(help="Bytes of one node's reads at the drives, such as 64MiB. Default: what its turns allow."),
    ],
    "session_hints": Annotated[
        int | None, typer.Option(help="Hinted experts of one node that wait to be read. Default: 256.")
    ],
    "keepalive_seconds": Annotated[
        float | None, typer.Option(help="Silence after which a node is asked for a sign of life. Default: 10.")
    ],
    "log_level": Annotated[str | None, typer.Option(help="debug, info, warning or error. Default: info.")],
}


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(serve)


@with_options(given=OPTIONS)
def serve(
    store: Annotated[Path, typer.Argument(help="Directory of a converted store.", show_default=False)],
    *,
    given: Given,
    stop_at_eof: Annotated[
        bool, typer.Option("--stop-at-eof", help="Stop when standard input, a pipe, ends.", hidden=True)
    ] = False,
    config: Annotated[Path | None, typer.Option(help="TOML file; its table `serve` holds these settings.")] = None,
) -> None:
    """Serve a store's experts to compute nodes.

    Every option can also be given as TIERD_OPTION in the environment, or in the table `serve` of the file that
    --config names.
    """
    opened, settings = _open(store, config, given)
    configure_logs(settings.log_level)
    # With the interpreter's 5 ms a thread whose read has ended waits that long for a busy loop, and its drive with it:
    # records of 1 MiB came at 1.4 GB/s instead of 1.7.
    sys.setswitchinterval(_SWITCH_SECONDS)
    if stop_at_eof and _abandoned():
        return
    uvloop.run(_serve(opened, settings, stop_at_eof=stop_at_eof))


def _open(path: Path, config: Path | None, flags: Given) -> tuple[ExpertStore, ServeSettings]:
    """The store, and the settings in force: below all others those that `tierd tune` found for it on this machine."""
    settings = ServeSettings.load(config=config, table="serve", flags=flags)
    store = ExpertStore.open(path, settings.also)
    if settings.profile is ProfileMode.OFF:
        return store, settings
    profile, problem = load_profile(store.fingerprint)
    if problem:
        print(f"tierd: {problem}", file=sys.stderr)
    if profile is None:
        return store, settings
    given = {"arena", "ram"} & settings.model_fields_set
    found = profile.serve.model_dump(exclude_none=True)
    tuned = {name: value for name, value in found.items() if not (given and name in ("arena", "ram"))}
    return store, ServeSettings.load(config=config, table="serve", flags=flags, tuned=tuned)


async def _serve(store: ExpertStore, settings: ServeSettings, *, stop_at_eof: bool) -> None:
    daemon = Daemon(store, settings)
    try:
        running = await daemon.startup()
        # What is there now stays: looking through all of it again and again would hold the loop up for milliseconds.
        gc.collect()
        gc.freeze()
        if stop_at_eof:
            _at_end_of_input(daemon.stop)
        print(_greeting(store, running), flush=True)
        await daemon.wait()
    finally:
        await asyncio.shield(daemon.shutdown())
    _log.info("stopped")


def _abandoned() -> bool:
    """Whether whoever started this daemon for itself has gone while it was imported, and its folder with it."""
    stdin = sys.stdin.fileno()
    if not stat.S_ISFIFO(os.fstat(stdin).st_mode):
        raise UsageError("--stop-at-eof: standard input is no pipe")
    return bool(select.select([stdin], [], [], 0)[0]) and not os.read(stdin, 4096)


def _at_end_of_input(stop: Callable[[], None]) -> None:
    """Whoever started this daemon for itself holds the pipe's other end, and is gone when it closes."""
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()

    def readable() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            stop()

    loop.add_reader(stdin, readable)


def _greeting(store: ExpertStore, running: Running) -> str:
    geometry, manifest = store.geometry, store.manifest
    experts = geometry.experts_total
    whole = format_bytes(experts * geometry.slot_bytes)
    share = running.slots / experts
    lines = [
        (
            f"store {store.path.name} · {manifest.model_type or 'synthetic'} · "
            f"{format_count(len(geometry.layers), 'layer')}, "
            f"{format_count(experts, 'expert')}, {manifest.expert_format} · {whole} of experts"
        ),
        (
            f"arena {format_bytes(running.arena_bytes)} ({format_share(share)}), "
            f"{format_count(running.slots, 'slot')} · at most {format_bytes(running.ram_bytes)} for the whole daemon · "
            f"drive {'direct' if running.direct else 'buffered'}"
        ),
        *running.drives,
        *([_too_few(running.slots, geometry.top_k)] if running.slots < geometry.top_k else []),
        *([f"for this host {running.local}"] if running.local is not None else []),
        *([f"page {running.http_url}"] if running.http_url else []),
        f"listening on {running.address}" + (f" · {running.http_url}/metrics" if running.http_url else ""),
    ]
    return "\n".join(lines)


def _too_few(slots: int, top_k: int) -> str:
    return f"! {slots} slots are fewer than the {top_k} experts of a token in a layer: it reads them in turns, slowly"

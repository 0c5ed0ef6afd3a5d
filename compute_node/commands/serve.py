"""`compute-node serve`: the APIs of OpenAI and Anthropic, and a page to chat on, for one model."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from compute_node.commands import options
from compute_node.commands.far_options import FAR
from compute_node.server.settings import ApiSettings
from tierd.client.own_daemon import early_daemon
from tierd.option_tables import Given, OptionTable, with_options
from tierd.stopping import stopped_by_signals
from tierd.terminal import show_hanging

if TYPE_CHECKING:
    from compute_node.commands.api_server import Served
    from compute_node.settings import NodeSettings
    from tierd.client.loop_thread import LoopThread
    from tierd.client.private_daemon import PrivateDaemon

__all__ = ["API", "ENGINE", "register", "serve"]

_SWITCH_SECONDS: Final = 0.0005
"""How long a thread may keep the interpreter from the others. With Python's 5 ms a busy loop of HTTP clients would
take as long from the engine at every layer."""
_CLIENTS: Final = "Clients"
_SLACK_SECONDS: Final = 10.0


API: Final[OptionTable] = {
    "http": Annotated[
        str | None,
        typer.Option("--http", rich_help_panel=_CLIENTS, help="Where to answer: HOST:PORT. Default: 127.0.0.1:8000."),
    ],
    "model_name": Annotated[
        list[str] | None,
        typer.Option(
            "--model-name",
            rich_help_panel=_CLIENTS,
            help="Name of the model for clients. Repeat it for more. Default: STORE's.",
        ),
    ],
    "api_key": Annotated[
        str | None,
        typer.Option(
            "--api-key",
            rich_help_panel=_CLIENTS,
            help="Key that clients must send. Others see command lines: prefer the file.",
        ),
    ],
    "api_key_file": Annotated[
        Path | None,
        typer.Option(
            "--api-key-file", rich_help_panel=_CLIENTS, metavar="FILE", help="Keys that clients may send, one a line."
        ),
    ],
    "insecure": Annotated[
        bool | None, typer.Option("--insecure", rich_help_panel=_CLIENTS, help="Answer beyond this host without a key.")
    ],
    "allowed_host": Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            rich_help_panel=_CLIENTS,
            metavar="NAME",
            help="Further name of this server, such as a proxy's. Repeat it for more.",
        ),
    ],
    "cors": Annotated[
        list[str] | None,
        typer.Option(
            "--cors",
            rich_help_panel=_CLIENTS,
            metavar="ORIGIN",
            help="Site whose pages may use the API. Repeat it for more.",
        ),
    ],
    "max_body": Annotated[
        str | None, typer.Option("--max-body", rich_help_panel=_CLIENTS, help="Largest request. Default: 8MiB.")
    ],
    "max_connections": Annotated[
        int | None,
        typer.Option("--max-connections", rich_help_panel=_CLIENTS, help="Most connections at once. Default: 512."),
    ],
    "client_seconds": Annotated[
        float | None,
        typer.Option(
            "--client-seconds",
            rich_help_panel=_CLIENTS,
            help="How long a client may send a request or not read. Default: 30.",
        ),
    ],
    "answer_seconds": Annotated[
        float | None,
        typer.Option("--answer-seconds", rich_help_panel=_CLIENTS, help="Longest time of an answer. Default: 3600."),
    ],
    "drain_seconds": Annotated[
        float | None,
        typer.Option(
            "--drain-seconds", rich_help_panel=_CLIENTS, help="Time for answers under way at the end. Default: 10."
        ),
    ],
}

ENGINE: Final[OptionTable] = {
    "max_running": Annotated[int | None, typer.Option("--max-running", help="Requests computed at once. Default: 16.")],
    "max_waiting": Annotated[
        int | None,
        typer.Option("--max-waiting", help="Requests that wait beside them; more are refused. Default: 64."),
    ],
    **options.SAMPLING,
    "max_tokens": Annotated[
        int | None,
        typer.Option("--max-tokens", help="Tokens of an answer where the client says nothing. Default: what fits."),
    ],
    **options.MODEL,
    **FAR,
}


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("serve")(serve)


@with_options(clients=API, given=ENGINE)
def serve(
    store: options.Store,
    *,
    clients: Given,
    given: Given,
    config: options.Config = None,
) -> None:
    """Serve a model: the APIs of OpenAI (/v1/chat/completions, /v1/completions) and Anthropic (/v1/messages), a chat
    page at /, and /metrics. Ctrl-C or SIGTERM stops it after the answers under way.
    """
    api = ApiSettings.load(config=config, table="api", flags=clients)
    settings = options.load_settings(config, given)
    with early_daemon(store, in_process=settings.in_process, arena=settings.arena) as daemon:
        _serve(store, settings, api, daemon)


def _serve(store: str, settings: NodeSettings, api: ApiSettings, daemon: PrivateDaemon | None) -> None:
    """Until a signal comes."""
    # The kernels and the server's libraries take a second and a half to import, which --help need not wait for.
    from compute_node.commands.api_server import check_address, serving  # noqa: PLC0415
    from compute_node.commands.opening import open_store  # noqa: PLC0415
    from tierd.client.loop_thread import LoopThread  # noqa: PLC0415

    # Before the weights are loaded.
    check_address(api)
    console = Console(stderr=True, highlight=False)
    loop, stopped = LoopThread.shared(), threading.Event()
    with (
        open_store(store, settings, name="serve", serving=True, daemon=daemon, console=console) as opened,
        serving(opened, store, settings, api, loop.loop) as served,
        stopped_by_signals(stopped.set),
    ):
        sys.setswitchinterval(_SWITCH_SECONDS)
        show_hanging(console, opened.headline(), indent=2, style="dim")
        # On standard output, so that a script can wait for it.
        print(f"serving {', '.join(served.service.names)} on {served.http.url}", flush=True)
        _run(served, loop, stopped, api.drain_seconds, console)


def _run(served: Served, loop: LoopThread, stopped: threading.Event, drain_seconds: float, console: Console) -> None:
    """Answers until a signal comes, then finishes what is under way."""
    answering: Future[None] = asyncio.run_coroutine_threadsafe(served.http.serve(), loop.loop)
    answering.add_done_callback(lambda _: stopped.set())
    try:
        stopped.wait()
        if console.is_terminal:
            console.print(
                f"stopping: answers under way have {drain_seconds:g} s; Ctrl-C again ends at once", style="dim"
            )
        served.http.stop()
        answering.result(drain_seconds + _SLACK_SECONDS)
    except TimeoutError:
        answering.cancel()

"""`compute-node serve`: the APIs of OpenAI and Anthropic, and a page to chat on, for one model."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from compute_node.commands import far_options, options
from compute_node.commands.opening import open_store
from compute_node.server.settings import ApiSettings
from tierd.client.loop_thread import LoopThread

if TYPE_CHECKING:
    from compute_node.commands.api_server import Served

__all__ = ["register", "serve"]

_SWITCH_SECONDS: Final = 0.0005
"""How long a thread may keep the interpreter from the others. With Python's 5 ms a busy loop of HTTP clients would
take as long from the engine at every layer."""
_CLIENTS: Final = "Clients"
_SLACK_SECONDS: Final = 10.0


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("serve")(serve)


def serve(
    store: options.Store,
    *,
    http: Annotated[
        str | None,
        typer.Option("--http", rich_help_panel=_CLIENTS, help="Where to answer: HOST:PORT. Default: 127.0.0.1:8000."),
    ] = None,
    model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--model-name", rich_help_panel=_CLIENTS, help="Name of the model for clients. Repeat. Default: STORE's."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            rich_help_panel=_CLIENTS,
            help="Key that clients must send. Others see command lines: prefer the file.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file", rich_help_panel=_CLIENTS, metavar="FILE", help="Keys that clients may send, one a line."
        ),
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", rich_help_panel=_CLIENTS, help="Answer beyond this host without a key.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            rich_help_panel=_CLIENTS,
            metavar="NAME",
            help="Further name of this server, such as a proxy's. Repeat.",
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            "--cors", rich_help_panel=_CLIENTS, metavar="ORIGIN", help="Site whose pages may use the API. Repeat."
        ),
    ] = None,
    max_body: Annotated[
        str | None, typer.Option("--max-body", rich_help_panel=_CLIENTS, help="Largest request. Default: 8MiB.")
    ] = None,
    max_connections: Annotated[
        int | None,
        typer.Option("--max-connections", rich_help_panel=_CLIENTS, help="Most connections at once. Default: 512."),
    ] = None,
    client_seconds: Annotated[
        float | None,
        typer.Option(
            "--client-seconds",
            rich_help_panel=_CLIENTS,
            help="How long a client may send a request or not read. Default: 30.",
        ),
    ] = None,
    answer_seconds: Annotated[
        float | None,
        typer.Option("--answer-seconds", rich_help_panel=_CLIENTS, help="Longest time of an answer. Default: 3600."),
    ] = None,
    drain_seconds: Annotated[
        float | None,
        typer.Option(
            "--drain-seconds", rich_help_panel=_CLIENTS, help="Time for answers under way at the end. Default: 10."
        ),
    ] = None,
    max_running: options.MaxRunning = None,
    max_waiting: options.MaxWaiting = None,
    kv_cache: options.KVCacheBudget = None,
    context: options.Context = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", help="Tokens of an answer where the client says nothing. Default: what fits."),
    ] = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.Penalty = None,
    numerics: options.Numerics = None,
    engine: options.Engine = None,
    device: options.Device = None,
    vram: options.Vram = None,
    threads: options.Threads = None,
    in_process: options.InProcessFlag = None,
    arena: options.Arena = None,
    patience: options.Patience = None,
    messages: options.Messages = None,
    prefetch: options.Prefetch = None,
    profile: options.Profile = None,
    experts: far_options.Experts = None,
    worker: far_options.Workers = None,
    worker_seconds: far_options.WorkerSeconds = None,
    store_cache: far_options.StoreCacheSize = None,
    tls_ca: far_options.TlsCa = None,
    tls_client_cert: far_options.TlsClientCert = None,
    tls_client_key: far_options.TlsClientKey = None,
    token_file: far_options.TokenFile = None,
    plaintext: far_options.Plaintext = None,
    config: options.Config = None,
) -> None:
    """Serve a model: the APIs of OpenAI (/v1/chat/completions, /v1/completions) and Anthropic (/v1/messages), a chat
    page at /, and /metrics. Ctrl-C or SIGTERM stops it after the answers under way.
    """
    api = ApiSettings.load(
        config=config,
        table="api",
        flags={
            "http": http,
            "model_name": model_name,
            "api_key": api_key,
            "api_key_file": api_key_file,
            "insecure": insecure,
            "allowed_host": allowed_host,
            "cors": cors,
            "max_body": max_body,
            "max_connections": max_connections,
            "client_seconds": client_seconds,
            "answer_seconds": answer_seconds,
            "drain_seconds": drain_seconds,
        },
    )
    settings = options.load_settings(
        config,
        max_running=max_running,
        max_waiting=max_waiting,
        kv_cache=kv_cache,
        context=context,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        numerics=numerics,
        engine=engine,
        device=device,
        vram=vram,
        threads=threads,
        in_process=in_process,
        arena=arena,
        patience=patience,
        messages=messages,
        prefetch=prefetch,
        profile=profile,
        experts=experts,
        worker=tuple(worker) if worker else None,
        worker_seconds=worker_seconds,
        store_cache=store_cache,
        tls_ca=tls_ca,
        tls_client_cert=tls_client_cert,
        tls_client_key=tls_client_key,
        token_file=token_file,
        plaintext=plaintext,
    )
    # The server's libraries take half a second to import, which other commands need not wait for.
    from compute_node.commands.api_server import check_address, serving  # noqa: PLC0415

    # Before the weights are loaded.
    check_address(api)
    console = Console(stderr=True, highlight=False)
    loop = LoopThread.shared()
    with (
        open_store(store, settings, name="serve", serving=True, console=console) as opened,
        serving(opened, store, settings, api, loop.loop) as served,
        _stopped_by_signals() as stopped,
    ):
        sys.setswitchinterval(_SWITCH_SECONDS)
        console.print(opened.headline(), style="dim", markup=False, soft_wrap=True)
        # On standard output, so that a script can wait for it.
        print(f"serving {', '.join(served.service.names)} on {served.http.url}", flush=True)
        _run(served, loop, stopped, api.drain_seconds)


def _run(served: Served, loop: LoopThread, stopped: threading.Event, drain_seconds: float) -> None:
    """Answers until a signal comes, then finishes what is under way."""
    answering: Future[None] = asyncio.run_coroutine_threadsafe(served.http.serve(), loop.loop)
    answering.add_done_callback(lambda _: stopped.set())
    try:
        stopped.wait()
        served.http.stop()
        answering.result(drain_seconds + _SLACK_SECONDS)
    except TimeoutError:
        answering.cancel()


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; the second one does what it did before."""
    stopped = threading.Event()
    before: dict[int, Any] = {}

    def stop(number: int, _frame: FrameType | None) -> None:
        stopped.set()
        signal.signal(number, before[number])

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, stop)
    try:
        yield stopped
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)

"""`tierd demo`: the main job on the embedded model, told to a person or to a program."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tierd.client.limit_words import limit_words
from tierd.client.private_daemon import PrivateDaemon
from tierd.demonstration import DemoAnswer, DemoRequest, ask, daemon_stats, embedded_store, node_command
from tierd.sizes import format_bytes, format_share
from tierd.store.store import ExpertStore
from tierd.terminal import show

__all__ = ["register"]

_WIDTH = 96
_INDENT = 2
_LONG_WORD = 8
"""Columns for the rest of a word that came in pieces."""
_TERMINATED = 143


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(demo)


def demo(
    *,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "It was a fine morning, and",
    tokens: Annotated[int, typer.Option(min=1, max=1024, help="Tokens to write.")] = 64,
    arena: Annotated[str, typer.Option(help="RAM for experts: an amount, or a share of the model's experts.")] = "25%",
    temperature: Annotated[float, typer.Option(min=0.0, max=5.0, help="0 always takes the likeliest token.")] = 0.7,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among this many likeliest tokens; 0 is all.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
    compare: Annotated[bool, typer.Option(help="Run again with all experts in RAM, and compare the tokens.")] = True,
    keep_running: Annotated[bool, typer.Option(help="Leave daemon and node running, and say where they are.")] = False,
    http: Annotated[
        str, typer.Option(help="With --keep-running: where the daemon's page and metrics answer.")
    ] = "127.0.0.1:9480",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Write text with a trained MoE model whose experts do not fit the arena, and show where they came from."""
    # A polite end stops daemon and node too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    with Console(stderr=True).status("preparing the embedded model") as status:
        store = embedded_store(status.update)
    request = DemoRequest(prompt, tokens, temperature, top_k, seed)
    teller = _Silent() if as_json else _Teller(store)
    answer = _run(store, request, arena, teller)
    teller.ended()
    full = _run(store, request, "100%", _Silent() if as_json else _Again()) if compare else None
    if full is not None and full.token_ids != answer.token_ids:
        print("tierd: the tokens differ between two arena sizes: this must never happen", file=sys.stderr)
        raise typer.Exit(1)
    if as_json:
        print(json.dumps(_object(store, answer, full), ensure_ascii=False))
    else:
        teller.report(answer, full)
    if keep_running:
        _stay(store, arena, http)


class _Silent:
    """Tells nothing while it runs."""

    waits_for = ""
    """What takes time, for people."""
    writes = False
    """Whether text begins to appear when the node computes, so that nobody waits any longer."""

    def began(self, arena_bytes: int) -> None:
        """Nothing to say."""

    def wrote(self, text: str) -> None:
        """Nothing to say."""

    def ended(self) -> None:
        """Nothing to say."""

    def report(self, answer: DemoAnswer, full: DemoAnswer | None) -> None:
        """Nothing to say."""


class _Again(_Silent):
    """Tells a person that the same is done once more."""

    waits_for = "running it again with all experts in RAM"


class _Teller(_Silent):
    """Tells a person what happens: the set-up, the text as it comes, then the figures."""

    waits_for = "starting daemon and node (the first run compiles the kernels, which takes a minute)"
    writes = True

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self._console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
        self._width = min(self._console.width, _WIDTH) - _LONG_WORD
        self._column = 0

    def began(self, arena_bytes: int) -> None:
        """Say what is being run."""
        geometry, manifest = self._store.geometry, self._store.manifest
        whole = geometry.experts_total * geometry.slot_bytes
        self._console.print(
            f"[bold]tierd[/bold] · embedded model ({manifest.model_type}, {len(geometry.layers)} layers x "
            f"{geometry.layers[0].experts} experts, {manifest.expert_format}) · {format_bytes(whole)} of experts"
        )
        self._console.print(f"arena {format_bytes(arena_bytes)}, {format_share(arena_bytes / whole)} of them\n")
        self._console.print("  ", end="")
        self._column = _INDENT

    def wrote(self, text: str) -> None:
        """Write a piece of text, broken at spaces before it gets too wide."""
        for place, piece in enumerate(text.split("\n")):
            if place:
                self._break()
            if self._column + len(piece) > self._width and piece.startswith(" "):
                self._break()
            if self._column == _INDENT:
                piece = piece.lstrip(" ")  # noqa: PLW2901, the space became the line's beginning
            self._console.print(piece, end="", markup=False, soft_wrap=True)
            self._column += len(piece)

    def _break(self) -> None:
        self._console.print("\n  ", end="")
        self._column = _INDENT

    def ended(self) -> None:
        """End the text's last line."""
        self._console.print()
        self._console.file.flush()

    def report(self, answer: DemoAnswer, full: DemoAnswer | None) -> None:
        """The figures, and how they compare to everything in RAM."""
        node, asked, arena = answer.node, answer.daemon["requests"], answer.daemon["arena"]
        geometry = self._store.geometry
        whole = geometry.experts_total * geometry.slot_bytes
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        hits = asked["hits"] / asked["requests"]
        table.add_row("tokens", f"{len(answer.token_ids)} · {_speed(node)} · first token {_milliseconds(node)}")
        table.add_row(
            "experts",
            f"{asked['requests']:,} asked · {asked['hits']:,} in RAM ({format_share(hits)}) · {asked['misses']:,} read"
            + "".join(f" · {asked[name]:,} {name}" for name in ("joined", "failed") if asked[name]),
        )
        read = answer.daemon["drives"][0]
        mean_miss = asked["miss_wait_seconds"] / asked["misses"] if asked["misses"] else 0.0
        table.add_row(
            "waited",
            f"{node['wait_seconds']:.2f} s for experts, {node['compute_seconds']:.2f} s computing · "
            f"a read took {1000 * mean_miss:.2f} ms on average",
        )
        table.add_row(
            "bytes",
            f"{format_bytes(answer.bytes_read)} read {'past' if read['direct'] else 'through'} the page cache"
            f" · arena {format_bytes(arena['bytes'])} where the experts need {format_bytes(whole)}",
        )
        if node["limit_share"] is not None:
            words = limit_words(node["limit_tokens_per_second"], node["limit_share"], node["lost_to"])
            table.add_row("limit", words)
        self._console.print()
        show(self._console, table)
        if full is not None:
            self._console.print(
                f"\nAgain with all experts in RAM: {_speed(full.node)}, {format_bytes(full.bytes_read)} read. "
                f"The {len(full.token_ids)} tokens were compared: they are [bold]the same[/bold]."
            )
        self._console.print(
            "\nNext, your own model: [bold]tierd convert CHECKPOINT STORE[/bold], "
            "then [bold]compute-node chat STORE[/bold]."
        )


def _run(store: ExpertStore, request: DemoRequest, arena: str, teller: _Silent) -> DemoAnswer:
    """One daemon, one node, one answer."""
    with _waiting(teller.waits_for) as stop_waiting:
        quiet = ("--http", "off", "--log-level", "warning", "--history", "off")
        daemon = PrivateDaemon(store.path, "--arena", arena, *quiet)
        try:
            arena_bytes = int(daemon_stats(daemon)["arena"]["bytes"])

            def began() -> None:
                if teller.writes:
                    stop_waiting()
                teller.began(arena_bytes)

            return ask(daemon, request, began=began, wrote=teller.wrote)
        finally:
            daemon.stop()


@contextmanager
def _waiting(what: str) -> Iterator[Callable[[], None]]:
    """Says what is waited for: on a terminal as long as the wait lasts, in a pipe once. Yields what ends it early."""
    console = Console(stderr=True)
    if not what or not console.is_terminal:
        if what:
            print(f"{what} …", file=sys.stderr, flush=True)
        yield lambda: None
        return
    with console.status(what) as status:
        yield status.stop


def _stay(store: ExpertStore, arena: str, http: str) -> None:
    """Daemon and node until the person has had enough."""
    daemon = PrivateDaemon(store.path, "--arena", arena, "--http", http)
    try:
        print(f"\nThe daemon runs: its page at http://{http}/, metrics at /metrics · {daemon.address}")
        print(f"Another node for it: compute-node generate {daemon.address} -p 'Once upon a time'")
        print(
            "This node continues what you type; /quit or Ctrl-C ends both."
            if sys.stdin.isatty()
            else "Ctrl-C ends both."
        )
        sys.stdout.flush()
        stdin = None if sys.stdin.isatty() else subprocess.PIPE
        with subprocess.Popen(node_command("chat", str(daemon.address)), stdin=stdin) as node:
            try:
                node.wait()
            except KeyboardInterrupt:
                node.terminate()
            finally:
                if node.stdin is not None:
                    node.stdin.close()
    finally:
        daemon.stop()


def _object(store: ExpertStore, answer: DemoAnswer, full: DemoAnswer | None) -> dict[str, Any]:
    """The contract for programs."""
    geometry = store.geometry
    content = _figures(answer) | {
        "experts_bytes": geometry.experts_total * geometry.slot_bytes,
        "text": answer.node["text"],
        "fingerprint": store.fingerprint,
        "direct": all(drive["direct"] for drive in answer.daemon["drives"]),
    }
    if full is not None:
        content["identical"] = full.token_ids == answer.token_ids
        content["everything_in_ram"] = _figures(full)
    return content


def _figures(answer: DemoAnswer) -> dict[str, Any]:
    node, asked = answer.node, answer.daemon["requests"]
    return {
        "token_ids": answer.token_ids,
        "tokens_per_second": node["tokens_per_second"],
        "time_to_first_token_seconds": node["time_to_first_token_seconds"],
        "requests": asked["requests"],
        "hits": asked["hits"],
        "misses": asked["misses"],
        "joined": asked["joined"],
        "cancelled": asked["cancelled"],
        "failed": asked["failed"],
        "node_unique_experts": node["unique_experts"],
        "bytes_read": answer.bytes_read,
        "arena_bytes": answer.daemon["arena"]["bytes"],
        "wait_seconds": node["wait_seconds"],
        "compute_seconds": node["compute_seconds"],
        "limit_share": node["limit_share"],
        "lost_to": node["lost_to"],
    }


def _speed(node: dict[str, Any]) -> str:
    rate = node["tokens_per_second"] or 0.0
    return f"{rate:,.0f} tok/s" if rate >= 10 else f"{rate:.2g} tok/s"


def _milliseconds(node: dict[str, Any]) -> str:
    return f"{1000 * (node['time_to_first_token_seconds'] or 0.0):.0f} ms"

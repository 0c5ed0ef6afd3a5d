"""The same clients over HTTP: what the API, its stream of events and another process cost beside the engine alone."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from compute_node.bench.child import Child
from compute_node.bench.client_load import ANSWER_SECONDS, Answered, Client, figures, run_clients
from compute_node.bench.quiet import Quiet
from compute_node.bench.serve_speed import Expected
from compute_node.engine.model import ModelOptions
from compute_node.text.tokenizer import Tokenizer
from tierd.client.in_process import InProcess
from tierd.errors import UnsupportedModel
from tierd.store.store import ExpertStore

__all__ = ["measure_http"]

_HEAD: Final = (
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
_EVENT: Final = b"data: {"
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
_MOST_BYTES: Final = 1 << 16


class _HttpClient(Client):
    """Reads answers from a server as they come, and closes the connection where it leaves.

    What came is looked into once it is all there: clients are elsewhere as a rule, and should not compute here either.
    """

    def __init__(
        self, address: tuple[str, int], number: int, expected: Expected, texts: Sequence[Sequence[str]], count: int
    ) -> None:
        self._prompts_of_its_own = expected.prompts[number::count]
        self._texts = texts[number::count]
        super().__init__(number, len(self._texts), len(self._texts[0]) - 1)
        self._address = address
        self._connection = self._connect()

    def ask(self, which: int, tokens: int, leaves_after: int) -> Answered:
        """See `Client.ask`."""
        body = json.dumps({
            "prompt": self._prompts_of_its_own[which], "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True,
        }).encode()  # fmt: skip
        raw = bytearray()
        times: list[float] = []
        try:
            self._connection.sendall(_HEAD % (self._address[1], len(body)) + body)
            ended = left = False
            while not (ended or left):
                seen = max(0, len(raw) - len(_EVENT) + 1)
                part = self._connection.recv(_MOST_BYTES)
                if not part:
                    break
                raw += part
                now = time.perf_counter()
                if events := raw.count(_EVENT, seen):
                    self.started.set()
                    times += [now] * events
                ended = raw.endswith(_LAST_CHUNK)
                left = not ended and leaves_after <= tokens and len(times) >= leaves_after
            if not ended:
                self._again()
            pieces, reason = _said(bytes(raw))
        except (OSError, ValueError, LookupError):
            self._again()
            return Answered([], 0, right=True, whole=False)
        text, whole = "".join(pieces), self._texts[which]
        # The last event of a whole answer says why it ended, and seldom more.
        times = times[: len([piece for piece in pieces if piece])]
        return Answered(
            times,
            len(times) if left else tokens,
            right=whole[-1].startswith(text) if left else text == whole[tokens],
            whole=ended and reason == "length",
            left=left,
        )

    def _again(self) -> None:
        self._connection.close()
        self._connection = self._connect()

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._address, timeout=ANSWER_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()


def _said(raw: bytes) -> tuple[list[str], str | None]:
    """The texts of all whole events of a chunked answer, and why it ended.

    Raises:
        ValueError: it is no such answer.
    """
    head, _, rest = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise ValueError(head[:80].decode(errors="replace"))
    body = b""
    while rest:
        size, found, rest = rest.partition(b"\r\n")
        if not found:
            break
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    texts: list[str] = []
    reason = None
    for event in body.split(b"\n\n")[:-1]:
        if event.startswith(_EVENT):
            choice = json.loads(event[len(_EVENT) - 1 :])["choices"][0]
            texts.append(choice["text"])
            reason = choice["finish_reason"]
    return texts, reason


def measure_http(
    store: Path,
    expected: Expected,
    *,
    how: ModelOptions,
    clients: Sequence[int],
    seconds: float,
    folder: Path,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Serves so many clients at once by `compute-node serve`, a process of its own, for `seconds` each.

    Args:
        store: of the model, with a tokenizer.
        expected: what is asked.
        how: the model is run; as many requests are computed at once as it has sequences.
        clients: how many, one measurement after the other.
        seconds: of each.
        folder: for the server's settings and its log.
        tell: takes a line when something begins.

    Returns:
        The same figures as of `measure_serving`, by client count.

    Raises:
        DaemonUnavailable: the server did not start.
    """
    tokenizer = Tokenizer.from_store(InProcess(ExpertStore.open(store)).store)
    if tokenizer is None:
        raise UnsupportedModel(f"{store} has no tokenizer, and the API is measured with text")
    texts = [_texts(tokenizer, answer) for answer in expected.answers]
    settings = folder / "serve.toml"
    settings.write_text(
        f"[node]\nin_process = true\nrows = {how.rows}\nmax_running = {how.sequences}\ncontext = {how.context}\n"
        f'numerics = "{how.numerics}"\nprofile = "off"\n'
        + ("" if how.threads is None else f"threads = {how.threads}\n")
        + '[api]\nhttp = "127.0.0.1:0"\n',
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "compute_node", "serve", str(store), "--config", str(settings)]
    tell("a server")
    server = Child("server", command, folder / "serve.log")
    try:
        found_at = urlsplit(server.wait_for("http://").split()[-1])
        address = (found_at.hostname or "", found_at.port or 0)
        with Quiet(beside=[server.pid]) as quiet:
            found = []
            for count in clients:
                tell(f"{count} clients over HTTP")
                asking = [_HttpClient(address, number, expected, texts, count) for number in range(count)]
                found.append(figures(asking, seconds, run_clients(asking, seconds)))
                for client in asking:
                    client.close()
    finally:
        server.end()
    result: dict[str, Any] = {
        name: {str(count): each[name] for count, each in zip(clients, found, strict=True)} for name in found[0]
    }
    return result | {name: sum(result[name].values()) for name in ("errors", "crossed_answers")} | quiet.report()


def _texts(tokenizer: Tokenizer, answer: Sequence[int]) -> list[str]:
    """The texts of no token, the first one, the first two, and so on; each as if the answer ended there."""
    texts = []
    for count in range(len(answer) + 1):
        decoder = tokenizer.stream(continues=True)
        texts.append("".join(map(decoder.push, answer[:count])) + decoder.flush())
    return texts

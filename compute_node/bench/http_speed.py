"""The same clients over HTTP: what the API, its stream of events and another process cost beside the engine alone."""

from __future__ import annotations

import http.client
import json
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

_DATA: Final = b"data: "
_END: Final = b"[DONE]"


class _HttpClient(Client):
    """Reads answers from a server as they come, and closes the connection where it leaves."""

    def __init__(
        self, address: str, number: int, expected: Expected, texts: Sequence[Sequence[str]], count: int
    ) -> None:
        self._prompts_of_its_own = expected.prompts[number::count]
        self._texts = texts[number::count]
        super().__init__(number, len(self._texts), len(self._texts[0]) - 1)
        self._address = address
        self._connection = self._connect()

    def ask(self, which: int, tokens: int, leaves_after: int) -> Answered:
        """See `Client.ask`."""
        pieces: list[str] = []
        times: list[float] = []
        body = {
            "prompt": self._prompts_of_its_own[which], "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        ended = reason = None
        try:
            self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            while len(pieces) < leaves_after and (line := response.readline()):
                if not line.startswith(_DATA):
                    continue
                ended = line[len(_DATA) :].strip() == _END
                if ended:
                    break
                choice = json.loads(line[len(_DATA) :])["choices"][0]
                reason = choice["finish_reason"]
                if choice["text"]:
                    self.started.set()
                    times.append(time.perf_counter())
                    pieces.append(choice["text"])
            if ended:
                response.read()
            else:
                self._again()
        except (OSError, http.client.HTTPException, ValueError, LookupError):
            self._again()
            return Answered([], 0, right=True, whole=False)
        text, whole = "".join(pieces), self._texts[which]
        left = len(pieces) == leaves_after and not ended
        return Answered(
            times,
            len(pieces) if left else tokens,
            right=whole[-1].startswith(text) if left else text == whole[tokens],
            whole=bool(ended) and reason == "length",
            left=left,
        )

    def _again(self) -> None:
        self._connection.close()
        self._connection = self._connect()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._address, timeout=ANSWER_SECONDS)

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()


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
        address = urlsplit(server.wait_for("http://").split()[-1]).netloc
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

"""The main job from end to end: the embedded model, a daemon, a compute node, and what each of them counted.

Daemon and node are the real programs as child processes. Nothing here knows the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierd.checkpoint.convert import convert
from tierd.client.daemon_stats import fetch_stats, stats_object
from tierd.client.private_daemon import PrivateDaemon
from tierd.errors import StoreDamaged, TierdError, UsageError
from tierd.state import cache_directory
from tierd.store.store import ExpertStore

__all__ = ["DemoAnswer", "DemoRequest", "ask", "daemon_stats", "embedded_store", "node_command"]

_EXPERTS_FORMAT = "int4-g64"
_EXIT_GRACE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """What the node is asked to write."""

    prompt: str
    tokens: int
    temperature: float
    top_k: int
    seed: int


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """One run: what the node reported, and what its daemon counted in the same time."""

    node: dict[str, Any]
    daemon: dict[str, Any]

    @property
    def token_ids(self) -> list[int]:
        """The tokens, prompt left out."""
        return list(self.node["token_ids"])

    @property
    def bytes_read(self) -> int:
        """Bytes of expert records that came from the drives."""
        return sum(int(drive["bytes"]) for drive in self.daemon["drives"])


def embedded_store(progress: Callable[[str], None]) -> ExpertStore:
    """The embedded model as a store, converted once per version of the model and kept in the user's cache.

    Raises:
        UsageError: the package `compute_node`, which brings the model, is not installed.
    """
    spec = importlib.util.find_spec("compute_node")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("the package compute_node is not installed; it brings the embedded model")
    checkpoint = Path(spec.submodule_search_locations[0]) / "embedded"
    store = cache_directory() / "demo" / f"embedded-{_EXPERTS_FORMAT}-{_identity(checkpoint)}"
    try:
        return ExpertStore.open(store)
    except StoreDamaged:
        progress("the cached store of the embedded model is damaged; converting it again")
        shutil.rmtree(store)
    except UsageError:
        progress("converting the embedded model (once)")
    store.parent.mkdir(parents=True, exist_ok=True)
    try:
        convert(checkpoint, store, experts=_EXPERTS_FORMAT)
    except UsageError as error:
        raise StoreDamaged(
            f"{store}: an earlier conversion cannot be gone on with: {error.message}", hint=f"Remove {store}."
        ) from error
    return ExpertStore.open(store)


def ask(
    daemon: PrivateDaemon, request: DemoRequest, *, began: Callable[[], None], wrote: Callable[[str], None]
) -> DemoAnswer:
    """Run a compute node on the daemon until it has answered.

    Args:
        daemon: a daemon that nobody else uses, so that its counters belong to this answer.
        request: what to write.
        began: called when the node is ready and computes.
        wrote: called with every piece of text as it comes.

    Raises:
        TierdError: the node ended without an answer; carries its last words.
    """
    command = [
        *node_command("generate", str(daemon.address)),
        *("--prompt", request.prompt, "--max-tokens", str(request.tokens), "--seed", str(request.seed)),
        *("--temperature", str(request.temperature), "--top-k", str(request.top_k), "--ignore-eos", "--events"),
    ]
    done: dict[str, Any] | None = None
    with tempfile.TemporaryFile() as words, _child(command, words) as node:
        assert node.stdout is not None
        for line in node.stdout:
            event = json.loads(line)
            match event.get("event"):
                case "start":
                    began()
                case "token":
                    wrote(event["text"])
                case "done":
                    done = event
        code = node.wait(_EXIT_GRACE_SECONDS)
        if done is None or code != 0:
            words.seek(0)
            last = words.read()[-2000:].decode("utf-8", "replace").strip()
            raise TierdError(f"the compute node ended with exit code {code}: {last}")
    return DemoAnswer(done, daemon_stats(daemon))


def daemon_stats(daemon: PrivateDaemon) -> dict[str, Any]:
    """The daemon's counters; see `tierd stats --json`."""
    return stats_object(asyncio.run(fetch_stats(daemon.address)))


def node_command(*arguments: str) -> list[str]:
    """The command line of a compute node in this environment."""
    return [sys.executable, "-m", "compute_node", *arguments]


@contextlib.contextmanager
def _child(command: list[str], words: Any) -> Iterator[subprocess.Popen[str]]:
    """A child that does not outlive the block."""
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=words, text=True, encoding="utf-8"
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_EXIT_GRACE_SECONDS)
            child.kill()
        if child.stdout is not None:
            child.stdout.close()
        child.wait()


def _identity(checkpoint: Path) -> str:
    """Changes when the shipped model does: sizes and the head of every file."""
    digest = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.*")):
        if file.suffix in (".safetensors", ".json"):
            with file.open("rb") as content:
                digest.update(f"{file.name}:{file.stat().st_size}:".encode() + content.read(1 << 16))
    return digest.hexdigest()[:12]

"""One trial: a daemon and a node as child processes, which decode a recorded text under the settings in question."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tierd.client.private_daemon import PrivateDaemon
from tierd.demonstration import daemon_stats, node_command
from tierd.errors import TierdError
from tierd.tuning.sweep import Outcome, Settings

__all__ = ["Workload", "describe", "run_trial"]

_TRIAL_SECONDS: Final = 1800.0
_LAST_WORDS: Final = 2000


@dataclass(frozen=True, slots=True)
class Workload:
    """What every trial does.

    Attributes:
        store: directory of a store.
        trace: a recorded run, whose tokens are decoded again.
        tokens: decoded in one run.
        rounds: runs that count; one more goes before.
        numerics: of the node.
    """

    store: Path
    trace: Path
    tokens: int
    rounds: int
    numerics: str


def run_trial(work: Workload, settings: Settings) -> Outcome:
    """Make a trial; nothing of the user's history is read or written by it.

    Raises:
        TierdError: a setting was refused, or the node failed; with its last words.
    """
    quiet = ("--http", "off", "--log-level", "warning", "--history", "off", "--profile", "off")
    daemon = PrivateDaemon(work.store, *quiet, *_flags(settings, "serve"))
    try:
        found = _decode(work, str(daemon.address), _flags(settings, "node"))
        stats = daemon_stats(daemon)
    finally:
        daemon.stop()
    drive = stats["drives"][0]
    facts = {
        name: found[name]
        for name in ("compute_seconds", "wait_seconds", "message_seconds", "memory_seconds", "threads", "hit_rate")
    } | {"slots": stats["arena"]["slots"], "drive_threads": drive["threads"], "direct": drive["direct"]}
    return Outcome(dict(settings), tuple(found["seconds_per_token"]), found["logits"], facts)


def _decode(work: Workload, address: str, flags: list[str]) -> dict[str, Any]:
    command = [
        *node_command("bench", "trace", address, str(work.trace)),
        *("--tokens", str(work.tokens), "--rounds", str(work.rounds), "--numerics", work.numerics, "--json", *flags),
    ]
    environment = os.environ | {"TIERD_NODE_HISTORY": "false", "TIERD_NODE_PROFILE": "off"}
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8", errors="replace",
        timeout=_TRIAL_SECONDS, env=environment, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise TierdError(f"a trial failed with exit code {done.returncode}: {done.stderr.strip()[-_LAST_WORDS:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _flags(settings: Settings, side: str) -> list[str]:
    """Command line options for the settings of one of the two programs."""
    flags: list[str] = []
    for name, value in settings.items():
        of, _, key = name.partition(".")
        option = key.replace("_", "-")
        if of == side and isinstance(value, bool):
            flags.append(f"--{option}" if value else f"--no-{option}")
        elif of == side:
            flags += [f"--{option}", str(value)]
    return flags


def describe(settings: Settings) -> str:
    """For people; "as they are" where nothing differs from the defaults."""
    return ", ".join(f"{name.partition('.')[2]} {value}" for name, value in settings.items()) or "as they are"

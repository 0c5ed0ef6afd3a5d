"""A node needs nothing but an address: it never opens a path that the daemon has."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from daemons import PROMPT

HIDDEN = 'mount -t tmpfs none "$1" && test -z "$(ls -A "$1")" && shift && exec "$@"'
"""Runs a command that sees an empty directory where its first argument was."""


@pytest.fixture
def without(embedded_store):
    """Words to put before a command, so that it cannot see the store's directory."""
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c", HIDDEN, "sh", str(embedded_store)]
    tried = subprocess.run([*words, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no mount namespace can be made here: {tried.stderr.strip()}")
    return words


def test_a_node_that_cannot_see_the_store_writes_the_same_tokens(serve, embedded_store, reference, without):
    daemon = serve(embedded_store, "--arena", "25%")
    done = subprocess.run(
        [
            *without, sys.executable, "-m", "compute_node", "generate", daemon.name, "-p", PROMPT,
            "--max-tokens", "32", "--ignore-eos", "--json",
        ],
        capture_output=True, text=True, check=False, timeout=100, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == reference["token_ids"][:32]
    blind = subprocess.run(
        [*without, sys.executable, "-m", "tierd", "inspect", str(embedded_store)],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert blind.returncode == 2, "the store is out of sight there"

"""A member's actor: it keeps one program and is as alive as that. When it ends Ray starts another one."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import ray

from tierd.addresses import Address
from tierd.fleet.looks import answers
from tierd.fleet.member import Member, State
from tierd.fleet.program import REFUSED, Program

__all__ = ["Keeper"]

_POLL_SECONDS: Final = 0.1
_PEERS_SECONDS: Final = 1.0
_PEER_ANSWER_SECONDS: Final = 5.0
_END_SECONDS: Final = 5.0
_FAILED_START_PAUSE: Final = 2.0
_REFUSED_PAUSE: Final = 30.0


class Keeper:
    """Ray runs it with a few threads, so that it can report while it stops.

    Args:
        member: what to run.
        digest: of the member, as the fleet's file said it; told in reports.
    """

    def __init__(self, member: Member, digest: str) -> None:
        self._member = member
        self._digest = digest
        self._host = ray.util.get_node_ip_address()
        self._state: State = "starting"
        self._began = time.time()
        self._words = ""
        self._program: Program | None = None
        self._stopping = threading.Event()
        self._folder = tempfile.TemporaryDirectory(prefix="tierd-fleet-")
        self._files = {peer: Path(self._folder.name) / peer for peer in member.peers}
        if member.peers:
            threading.Thread(target=self._find_peers, name="tierd-fleet-peers", daemon=True).start()
        threading.Thread(target=self._run, name="tierd-fleet-keeper", daemon=True).start()

    def report(self) -> dict[str, Any]:
        """How the program is: `state`, `address` (empty until it serves), `host`, `pid`, `began`, `digest`, `words`."""
        program = self._program
        return {
            "state": self._state,
            "address": str(self._address(program) or "") if self._state == "serving" else "",
            "host": self._host,
            "pid": program.pid if program is not None else 0,
            "began": self._began,
            "digest": self._digest,
            "words": self._words or (program.last_words if program is not None and self._state == "starting" else ""),
        }

    def stop(self, seconds: float) -> None:
        """End the program, gracefully within so many seconds. Ray must be told not to start it again."""
        self._state = "ending"
        self._stopping.set()
        if self._program is not None:
            self._program.end(seconds)

    def _run(self) -> None:
        """The thread that the program hangs on; with it ends the process, unless that was told to stop."""
        try:
            self._keep()
        finally:
            if not self._stopping.is_set():
                self._folder.cleanup()
                os._exit(1)

    def _keep(self) -> None:
        self._wait_for_a_peer()
        if self._stopping.is_set():
            return
        self._program = program = Program(self._member.words(self._host, self._files))
        served = self._wait_until_serving(program) and self._watch(program)
        if self._stopping.is_set():
            return
        program.end(_END_SECONDS)
        code = program.exit_code
        self._words = f"its program ended with exit code {code}: {program.last_words}"
        print(f"{self._member.name}: {self._words}", file=sys.stderr, flush=True)
        pause = 0.0
        if code == REFUSED:
            self._state = "refused"
            pause = _REFUSED_PAUSE
        elif not served:
            pause = _FAILED_START_PAUSE
        self._stopping.wait(pause)

    def _wait_for_a_peer(self) -> None:
        until = time.monotonic() + self._member.bounds.start_seconds
        while self._files and not any(file.exists() for file in self._files.values()):
            if self._stopping.wait(_POLL_SECONDS) or time.monotonic() > until:
                return

    def _wait_until_serving(self, program: Program) -> bool:
        until = time.monotonic() + self._member.bounds.start_seconds
        while program.address is None:
            if program.wait(_POLL_SECONDS) is not None or time.monotonic() > until:
                return False
        self._state = "serving"
        return True

    def _watch(self, program: Program) -> bool:
        """Until it ends, or has not answered for too often; True."""
        bounds, failures = self._member.bounds, 0
        while program.wait(bounds.look_seconds) is None and failures < bounds.failures:
            address = self._address(program)
            assert address is not None
            failures = 0 if answers(self._member, address, bounds.answer_seconds) else failures + 1
        if program.exit_code is None:
            print(f"{self._member.name}: its program does not answer", file=sys.stderr, flush=True)
        return True

    def _address(self, program: Program | None) -> Address | None:
        """Where others reach the program, though it may listen on all addresses of this host."""
        address = program.address if program is not None else None
        if address is not None and address.host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
            return Address(host=self._host, port=address.port)
        return address

    def _find_peers(self) -> None:
        """Write down where workers are, as often as they move."""
        known: dict[str, str] = {}
        while not self._stopping.wait(_PEERS_SECONDS if known else _POLL_SECONDS):
            for peer, file in self._files.items():
                address = self._ask(peer)
                if address and known.get(peer) != address:
                    part = file.with_suffix(".part")
                    part.write_text(address)
                    part.rename(file)
                    known[peer] = address

    def _ask(self, peer: str) -> str:
        try:
            actor = ray.get_actor(peer, namespace=self._member.namespace)
            return str(ray.get(actor.report.remote(), timeout=_PEER_ANSWER_SECONDS)["address"])
        except (ValueError, ray.exceptions.RayError):
            return ""  # it is not there now, and may be soon

"""What travels over the attach socket, once, in each direction.

The node sends a frame of fixed size, magic and token. The daemon answers with a length, a small JSON object that
describes the arena, and four descriptors: payload (read-only), residency table (read-only), session block, and one end
of a pair of sockets for the session's messages. After that the connection carries nothing more: it is the life line,
whose end tells each side that the other is gone.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Final

from tierd.errors import ArenaError

__all__ = [
    "ANSWER_LENGTH",
    "DESCRIPTORS",
    "HELLO_BYTES",
    "MAX_ANSWER_BYTES",
    "TOKEN_BYTES",
    "ArenaDescription",
    "ArenaOffer",
    "hello",
    "token_of",
]

TOKEN_BYTES: Final = 32
DESCRIPTORS: Final = 4
"""Payload, table, session block, socket for messages, in this order. Older daemons have an eventfd in its place."""
MAX_ANSWER_BYTES: Final = 4096
ANSWER_LENGTH: Final = struct.Struct("<I")
_MAGIC: Final = b"TIERDAT1"
HELLO_BYTES: Final = len(_MAGIC) + TOKEN_BYTES
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class ArenaOffer:
    """The daemon's descriptors and figures that are the same for every session; the descriptors stay its own.

    Attributes:
        payload_fd: read-only descriptor of the payload.
        payload_bytes: its size, a multiple of 2 MiB.
        table_fd: read-only descriptor of the residency table.
        boot_id: 16 random bytes of the daemon's start.
        slot_bytes: bytes of one slot.
        slots: number of slots.
        entries: experts in the table, and in every session block.
    """

    payload_fd: int
    payload_bytes: int
    table_fd: int
    boot_id: bytes
    slot_bytes: int
    slots: int
    entries: int

    def answer(self) -> bytes:
        """The framed answer that goes with the descriptors."""
        body = json.dumps(
            {
                "version": _VERSION,
                "boot_id": self.boot_id.hex(),
                "payload_bytes": self.payload_bytes,
                "slot_bytes": self.slot_bytes,
                "slots": self.slots,
                "entries": self.entries,
            }
        ).encode()
        return ANSWER_LENGTH.pack(len(body)) + body


@dataclass(frozen=True, slots=True)
class ArenaDescription:
    """The node's reading of the answer; sizes in bytes, see `ArenaOffer`."""

    boot_id: bytes
    payload_bytes: int
    slot_bytes: int
    slots: int
    entries: int

    @classmethod
    def parse(cls, body: bytes) -> ArenaDescription:
        """Check and read the JSON object of an answer; ArenaError if it is not one of this version."""
        try:
            fields = json.loads(body)
            if fields["version"] != _VERSION:
                raise ArenaError(
                    f"the daemon's attach socket speaks version {fields['version']}, this node version {_VERSION}",
                    hint="Run the same version of tierd on both sides.",
                )
            sizes = [fields[name] for name in ("payload_bytes", "slot_bytes", "slots", "entries")]
            boot_id = bytes.fromhex(fields["boot_id"])
        except (ValueError, KeyError, TypeError) as error:
            raise ArenaError(f"the daemon's attach socket gave a malformed answer: {error!r}") from error
        if len(boot_id) != 16 or not all(type(size) is int and size > 0 for size in sizes):
            raise ArenaError("the daemon's attach socket described an arena with impossible sizes")
        description = cls(boot_id, *sizes)
        if description.slots * description.slot_bytes > description.payload_bytes:
            raise ArenaError(
                f"the daemon described {description.slots} slots of {description.slot_bytes} bytes "
                f"in an arena of {description.payload_bytes} bytes"
            )
        return description


def hello(token: bytes) -> bytes:
    """The node's frame."""
    if len(token) != TOKEN_BYTES:
        raise ArenaError(f"an attach token has {TOKEN_BYTES} bytes, this one has {len(token)}")
    return _MAGIC + token


def token_of(frame: bytes) -> bytes | None:
    """The token inside a node's frame; None if the frame is not one."""
    if len(frame) != HELLO_BYTES or not frame.startswith(_MAGIC):
        return None
    return frame[len(_MAGIC) :]

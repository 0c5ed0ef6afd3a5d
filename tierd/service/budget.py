"""`--ram`: the memory of a whole daemon, and how many experts fit into it.

Everything that a daemon allocates is in the sum: what it cannot do without is taken off, the rest becomes slots. The
figures are measured (tests/integration/test_ram.py compares them with a loaded daemon), with a stated slack. Pages
of shared libraries are left out: all processes share them and the kernel drops them when it must.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tierd.arena.session_block import session_memory
from tierd.errors import UsageError
from tierd.memory_limits import GroupLimit, HostMemory
from tierd.sizes import format_bytes, parse_share

__all__ = [
    "AUTO",
    "TRANSFERS",
    "Budget",
    "BudgetItem",
    "DaemonFacts",
    "RamChoice",
    "choose_ram",
    "fixed_items",
    "plan_budget",
]

AUTO: Final = "auto"

_INTERPRETER_BYTES: Final = 52 << 20
"""Private memory of an idle daemon whose metrics are read, measured as 50 MiB with Python 3.11 and grpcio 1.82."""
_BYTES_PER_EXPERT: Final = 1024
"""Index, catalogue, table word, slot state, policy and history: about 600 bytes each when all are in use."""
_BYTES_PER_SESSION: Final = 224 << 10
"""gRPC's buffers and what is unsent of a session's answers, measured as 13 MiB for 63 busy sessions."""
TRANSFERS: Final = 4
"""Records as bytes for nodes without shared memory; more callers wait (`tierd.service.store_service`)."""
_BYTES_PER_TRANSFER: Final = 6 << 20
"""Copies of chunks of 1 MiB in protobuf, gRPC and the allocator, beside the record: measured as 5 to 6.3 MiB."""
_SLACK_BYTES: Final = 3 << 20
"""Fragments of the allocator, metrics, and what was forgotten."""

_NODE_BYTES: Final = 384 << 20
"""A compute node without its dense weights: interpreter, compiled kernels, KV cache of a modest context."""
_HOST_RESERVE: Final = 0.10
_HOST_RESERVE_BYTES: Final = (256 << 20, 8 << 30)
_GROUP_RESERVE: Final = 0.05


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """What the size of a daemon depends on.

    Attributes:
        experts: routed experts of the store.
        slot_bytes: largest record.
        top_k: experts of a token in a layer.
        spares: slots for reads beside another read of the same expert.
        max_sessions: compute nodes at once.
    """

    experts: int
    slot_bytes: int
    top_k: int
    spares: int
    max_sessions: int


@dataclass(frozen=True, slots=True)
class BudgetItem:
    """One line of the sum."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Budget:
    """The sum.

    Attributes:
        ram: bytes that the daemon may have.
        items: what they go to, experts last.
        slots: experts that fit.
    """

    ram: int
    items: tuple[BudgetItem, ...]
    slots: int


@dataclass(frozen=True, slots=True)
class RamChoice:
    """How `--ram` was understood: bytes, and lines that explain them."""

    nbytes: int
    lines: tuple[str, ...]


def fixed_items(facts: DaemonFacts) -> tuple[BudgetItem, ...]:
    """What a daemon needs beside its experts."""
    session = session_memory(facts.experts) + _BYTES_PER_SESSION
    return (
        BudgetItem("interpreter and imports", _INTERPRETER_BYTES),
        BudgetItem(f"index, table and policy of {facts.experts:,} experts", facts.experts * _BYTES_PER_EXPERT),
        BudgetItem(f"{facts.max_sessions} sessions: blocks and buffers", facts.max_sessions * session),
        BudgetItem(f"{facts.spares} spare slots for second reads", facts.spares * facts.slot_bytes),
        BudgetItem(
            f"{TRANSFERS} records on their way to far nodes", TRANSFERS * (facts.slot_bytes + _BYTES_PER_TRANSFER)
        ),
        BudgetItem("slack", _SLACK_BYTES + (2 << 20)),  # and the arena's last extent, which may be half empty
    )


def plan_budget(ram: int, facts: DaemonFacts) -> Budget:
    """How many experts fit a daemon of `ram` bytes.

    Raises:
        UsageError: fewer than a token's experts of one layer; the message names the figure that is needed.
    """
    items = fixed_items(facts)
    fixed = sum(item.nbytes for item in items)
    least = fixed + min(facts.top_k, facts.experts) * facts.slot_bytes
    if ram < least:
        raise UsageError(
            f"--ram: {ram} bytes ({format_bytes(ram)}) are too few; this store needs at least {least} bytes "
            f"({format_bytes(least)}): {format_bytes(fixed)} for the daemon itself and {facts.top_k} experts of "
            f"{format_bytes(facts.slot_bytes)}",
            hint=f"Give at least --ram {-(-least >> 20) + 1}MiB, or fewer --max-sessions.",
        )
    slots = min((ram - fixed) // facts.slot_bytes, facts.experts)
    return Budget(ram, (*items, BudgetItem(f"{slots:,} experts", slots * facts.slot_bytes)), slots)


def choose_ram(
    text: str, host: HostMemory, groups: Sequence[GroupLimit], *, dense_bytes: int, elsewhere: bool = False
) -> RamChoice:
    """The bytes that `--ram` means: an amount, a share of what this process may have, or `auto`.

    `auto` is the least of what the host has left and what each control group has left, minus a reserve: 10 % of the
    host (256 MiB to 8 GiB) and room for one compute node; 5 % of a group's limit.

    Args:
        text: as given.
        host: the host's memory.
        groups: limits that hold for this process.
        dense_bytes: of the store, which each compute node keeps in its own memory.
        elsewhere: more than this process may have is an amount for another machine, and said to be so.

    Raises:
        UsageError: no amount, or more than the host has or a group allows.
    """
    tightest = min(groups, key=lambda group: group.limit, default=None)
    most = min(host.total, tightest.limit) if tightest is not None else host.total
    where = tightest.source if tightest is not None and tightest.limit < host.total else "the host's memory"
    if text.strip().lower() == AUTO:
        return _auto(host, groups, dense_bytes)
    nbytes = parse_share(text, whole=most, option="--ram")
    if nbytes > most:
        more = f"--ram {text} is more than the {format_bytes(most)} that {where} allows"
        if not elsewhere:
            raise UsageError(more, hint="Give less, or --ram auto, or raise the limit.")
        return RamChoice(nbytes, (f"{more}: a daemon with it needs another machine",))
    share = f", of {format_bytes(most)} by {where}" if text.strip().endswith("%") else ""
    return RamChoice(nbytes, (f"--ram {text} is {format_bytes(nbytes)}{share}",))


def _auto(host: HostMemory, groups: Sequence[GroupLimit], dense_bytes: int) -> RamChoice:
    low, high = _HOST_RESERVE_BYTES
    reserve = int(min(max(host.total * _HOST_RESERVE, low), high))
    node = dense_bytes + _NODE_BYTES
    choices = [
        (
            max(0, host.available - reserve - node),
            (
                f"host: {format_bytes(host.available)} available of {format_bytes(host.total)}, less a reserve of "
                f"{format_bytes(reserve)} and {format_bytes(node)} for a compute node"
            ),
        )
    ]
    for group in groups:
        reserve = int(group.limit * _GROUP_RESERVE)
        choices.append(
            (
                max(0, group.limit - group.used - reserve),
                (
                    f"{group.source}: {format_bytes(group.limit)}, less {format_bytes(group.used)} in use by others "
                    f"and a reserve of {format_bytes(reserve)}"
                ),
            )
        )
    least = min(choices, key=lambda choice: choice[0])
    lines = [f"{reason} = {format_bytes(nbytes)}" for nbytes, reason in choices]
    return RamChoice(least[0], (*lines, f"--ram auto takes the least: {format_bytes(least[0])}"))

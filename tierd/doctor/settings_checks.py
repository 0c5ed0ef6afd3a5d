"""Settings that contradict each other, the store or the host."""

from __future__ import annotations

from pathlib import Path

from tierd.arena.memory import SharedPayload
from tierd.devices.fault_plan import read_fault_plan
from tierd.devices.probe import DEFAULT_DEPTH
from tierd.doctor.check import Check, Status
from tierd.doctor.host_checks import MemoryRoom
from tierd.errors import TierdError
from tierd.service.mirror_option import parse_mirror
from tierd.service.ram import arena_size, facts_of
from tierd.service.remembering import NO_PINS, read_pins
from tierd.settings import HistoryMode, ServeSettings
from tierd.sizes import format_bytes
from tierd.store.store import ExpertStore

__all__ = ["check_settings"]


def check_settings(store: ExpertStore, settings: ServeSettings, room: MemoryRoom) -> list[Check]:
    """Everything about the settings in force (file and environment) that will not work or was hardly meant."""
    found = [
        *_arena(store, settings, room),
        *_directories(store, settings),
        *_history(store, settings),
        *_fault_plan(settings),
    ]
    return found or [Check("settings", Status.OK, f"arena {settings.arena}, policy {settings.policy}")]


def _arena(store: ExpertStore, settings: ServeSettings, room: MemoryRoom) -> list[Check]:
    record = store.geometry.slot_bytes
    try:
        facts = facts_of(store, settings, DEFAULT_DEPTH + 1)
        wanted = arena_size(settings, facts, store.manifest.dense_bytes).slots * record
        if settings.arena_dir is not None:
            SharedPayload.create(1, settings.arena_dir).close()
    except TierdError as error:
        return [Check("settings", Status.PROBLEM, error.message, error.hint)]
    asked = f"ram {settings.ram}" if settings.ram else f"arena {settings.arena}"
    if not wanted:
        detail = f"{asked} holds no expert; one takes {format_bytes(record)}"
        return [Check("settings", Status.PROBLEM, detail, f"Give --arena at least {record}.")]
    most = room.for_experts
    if wanted > room.free:
        detail = f"{asked} is {format_bytes(wanted)} of experts, but there is memory for {format_bytes(most)}"
        return [Check("settings", Status.PROBLEM, detail, _smaller(most))]
    if wanted > most:
        detail = f"{asked} is {format_bytes(wanted)} of experts; with {format_bytes(most)} a node fits beside it safely"
        return [Check("settings", Status.REMARK, detail, _smaller(most))]
    return []


def _history(store: ExpertStore, settings: ServeSettings) -> list[Check]:
    checks = []
    if settings.state_dir is not None and settings.history is HistoryMode.OFF:
        detail = f"state_dir {settings.state_dir} is given, but history is off: nothing lies there"
        checks.append(Check("settings", Status.REMARK, detail, "Switch history on, or leave state_dir out."))
    if settings.pin != NO_PINS:
        try:
            read_pins(store, Path(settings.pin))
        except TierdError as error:
            checks.append(Check("settings", Status.PROBLEM, error.message, error.hint or "Mend the file of pins."))
    return checks


def _smaller(most: int) -> str:
    return f"Give --arena {most} or less."


def _directories(store: ExpertStore, settings: ServeSettings) -> list[Check]:
    checks = []
    seen: dict[Path, str] = {store.path.resolve(): "the store itself"}
    for text in settings.mirror:
        try:
            directory = parse_mirror(text).directory
        except TierdError as error:
            checks.append(Check("settings", Status.PROBLEM, error.message, error.hint))
            continue
        if not directory.is_dir():
            checks.append(
                Check("settings", Status.PROBLEM, f"mirror {directory} is not there", "Mount it, or drop it.")
            )
        elif directory.resolve() in seen:
            other = seen[directory.resolve()]
            checks.append(
                Check("settings", Status.REMARK, f"mirror {directory} is {other}; it adds nothing", "Leave it out.")
            )
        seen.setdefault(directory.resolve(), f"also named as mirror {directory}")
    used = {path.parent.resolve() for path in store.shard_paths}
    for directory in settings.also:
        if not directory.is_dir():
            checks.append(Check("settings", Status.PROBLEM, f"also {directory} is not there", "Mount it, or drop it."))
        elif directory.resolve() not in used:
            checks.append(
                Check(
                    "settings",
                    Status.REMARK,
                    f"also {directory} holds no shard that {store.path} lacks",
                    "Leave it out, or name it as a mirror.",
                )
            )
    return checks


def _fault_plan(settings: ServeSettings) -> list[Check]:
    if settings.fault_plan is None:
        return []
    try:
        plan = read_fault_plan(settings.fault_plan)
    except TierdError as error:
        return [Check("settings", Status.PROBLEM, error.message, error.hint)]
    detail = f"fault plan {settings.fault_plan} ({plan!r}) damages reads on purpose"
    return [Check("settings", Status.REMARK, detail, "Leave fault_plan out where this is no test.")]

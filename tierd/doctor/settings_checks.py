"""Settings that contradict each other, the store or the host."""

from __future__ import annotations

from pathlib import Path

from tierd.arena.memory import SharedPayload
from tierd.devices.fault_plan import read_fault_plan
from tierd.doctor.check import Check, Status
from tierd.doctor.host_checks import MemoryRoom
from tierd.errors import TierdError
from tierd.service.mirror_option import parse_mirror
from tierd.settings import ServeSettings
from tierd.sizes import format_bytes, parse_share
from tierd.store.store import ExpertStore

__all__ = ["check_settings"]


def check_settings(store: ExpertStore, settings: ServeSettings, room: MemoryRoom) -> list[Check]:
    """Everything about the settings in force (file and environment) that will not work or was hardly meant."""
    found = [*_arena(store, settings, room), *_directories(store, settings), *_fault_plan(settings)]
    return found or [Check("settings", Status.OK, f"arena {settings.arena}, policy {settings.policy}")]


def _arena(store: ExpertStore, settings: ServeSettings, room: MemoryRoom) -> list[Check]:
    geometry = store.geometry
    whole = geometry.experts_total * geometry.slot_bytes
    try:
        wanted = min(parse_share(settings.arena, whole=whole, option="arena"), whole)
    except TierdError as error:
        return [Check("settings", Status.PROBLEM, error.message, error.hint)]
    label = f"arena {settings.arena} is {format_bytes(wanted)}"
    if wanted < geometry.slot_bytes:
        one = format_bytes(geometry.slot_bytes)
        return [
            Check(
                "settings", Status.PROBLEM, f"{label}; one expert takes {one}", f"Give at least {geometry.slot_bytes}."
            )
        ]
    most = room.for_experts
    if wanted > room.free:
        return [
            Check("settings", Status.PROBLEM, f"{label}, but there is memory for {format_bytes(most)}", _smaller(most))
        ]
    if wanted > most:
        detail = f"{label}; with {format_bytes(most)} a daemon and one node on this host would both fit safely"
        return [Check("settings", Status.REMARK, detail, _smaller(most))]
    if settings.arena_dir is not None:
        try:
            SharedPayload.create(1, settings.arena_dir).close()
        except TierdError as error:
            return [Check("settings", Status.PROBLEM, f"arena_dir: {error.message}", error.hint)]
    return []


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

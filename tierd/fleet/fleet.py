"""A fleet on the cluster of Ray that this process is connected to: brought up, looked at, taken down."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import ray
from ray import serve

from tierd.errors import DaemonUnavailable
from tierd.fleet.entrance import EntranceReplica
from tierd.fleet.fleet_file import FleetFile
from tierd.fleet.keeper import Keeper
from tierd.fleet.looks import http_answers
from tierd.fleet.member import Member, members_of

__all__ = ["bring_up", "fleet_status", "take_down", "wait_until_up"]

_ANSWER_SECONDS: Final = 5.0
_STOP_SECONDS: Final = 15.0
_LOOK_SECONDS: Final = 0.5
_THREADS: Final = 4
_UNREACHABLE: Final = {"state": "unreachable", "address": "", "host": "", "pid": 0, "began": 0.0, "words": ""}


def bring_up(fleet: FleetFile, tell: Callable[[str], None]) -> None:
    """Make the cluster have what the file says: what lacks is started, what differs replaced, the rest left or ended.

    Returns when all is asked for; see `wait_until_up`.
    """
    members = members_of(fleet)
    wanted = {member.name: member for member in members}
    reports = _reports(fleet, _present(fleet))
    unlike = [name for name, report in reports.items() if name in wanted and _differs(report, wanted[name])]
    superfluous = [name for name in reports if name not in wanted]
    for name in (*superfluous, *unlike):
        tell(f"ending {name}")
    _end(fleet, [*superfluous, *unlike])
    for member in members:
        if member.name not in reports or member.name in unlike:
            tell(f"starting {member.name}")
            _start(member)
    tell(f"the entrance at http://{fleet.entrance.http}")
    _open_entrance(fleet, [member.name for member in members if member.kind == "node"])


def wait_until_up(fleet: FleetFile, seconds: float, give_up: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """The status as soon as all serve or one is refused, at the latest after so many seconds, or to give up."""
    until = time.monotonic() + seconds
    while True:
        status = fleet_status(fleet)
        states = {member["state"] for member in status["members"]}
        if status["up"] or "refused" in states or give_up() or time.monotonic() > until:
            return status
        time.sleep(_LOOK_SECONDS)


def fleet_status(fleet: FleetFile) -> dict[str, Any]:
    """`up`: whether all is well; `members`: name, kind and report of each; `entrance`: address and state."""
    members = members_of(fleet)
    reports = _reports(fleet, [member.name for member in members])
    found = [
        {"name": member.name, "kind": member.kind, **(reports.get(member.name) or _UNREACHABLE)} for member in members
    ]
    entrance = {"address": f"http://{fleet.entrance.http}", **_entrance_state(fleet)}
    up = entrance["answers"] and all(member["state"] == "serving" for member in found)
    return {"fleet": fleet.name, "up": up, "members": found, "entrance": entrance}


def take_down(fleet: FleetFile, tell: Callable[[str], None]) -> None:
    """End everything that bears the fleet's name: first the entrance, then nodes, then workers."""
    applications = serve.status().applications
    if fleet.name in applications:
        tell("closing the entrance")
        serve.delete(fleet.name)
        if len(applications) == 1:
            serve.shutdown()
    names = _present(fleet)
    nodes = [member.name for member in members_of(fleet) if member.kind == "node"]
    for part in ([name for name in names if name in nodes], [name for name in names if name not in nodes]):
        if part:
            tell(f"ending {', '.join(part)}")
        _end(fleet, part)


def _start(member: Member) -> None:
    actor = ray.remote(Keeper).options(
        name=member.name,
        namespace=member.namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        num_cpus=0,
        resources=member.on,
        max_concurrency=_THREADS,
    )
    actor.remote(member, member.digest)


def _open_entrance(fleet: FleetFile, nodes: list[str]) -> None:
    entrance = fleet.entrance
    where = {"host": entrance.address.host, "port": entrance.address.port}
    try:
        serve.start(proxy_location=entrance.location, http_options=where)
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise DaemonUnavailable(f"the entrance does not begin to listen on {entrance.http}: {error}") from error
    deployment = serve.deployment(
        name="entrance",
        num_replicas=entrance.replicas,
        max_ongoing_requests=entrance.max_requests,
        max_queued_requests=entrance.max_requests,
        ray_actor_options={"num_cpus": 0, "resources": dict(entrance.on)},
    )(EntranceReplica)
    application = deployment.bind(entrance.model_dump(), nodes, fleet.namespace)
    try:
        serve.run(application, name=fleet.name, route_prefix="/", blocking=False)
    except (ray.exceptions.RayError, RuntimeError) as error:
        raise DaemonUnavailable(f"Ray Serve does not run the entrance: {error}") from error


def _entrance_state(fleet: FleetFile) -> dict[str, Any]:
    application = serve.status().applications.get(fleet.name)
    state = "absent" if application is None else application.status.value.lower()
    host, port = fleet.entrance.address.host, fleet.entrance.address.port
    return {"state": state, "answers": application is not None and http_answers(host, port, "/health", _ANSWER_SECONDS)}


def _present(fleet: FleetFile) -> list[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(str(actor["name"]) for actor in actors if actor["namespace"] == fleet.namespace)


def _differs(report: dict[str, Any] | None, member: Member) -> bool:
    """Whether an actor was started by another file; one that does not answer is believed not to have been."""
    return report is not None and report["digest"] != member.digest


def _reports(fleet: FleetFile, names: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    """By name of the actors that exist, what they report; None: nothing within its time."""
    asked: dict[str, Any] = {}
    for name in names:
        try:
            asked[name] = ray.get_actor(name, namespace=fleet.namespace).report.remote()
        except (ValueError, ray.exceptions.RayError):
            continue
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_SECONDS)
    return {name: _result(answer) for name, answer in asked.items()}


def _result(answer: Any) -> dict[str, Any] | None:
    try:
        report: dict[str, Any] = ray.get(answer, timeout=0)
    except ray.exceptions.RayError:
        return None
    return report


def _end(fleet: FleetFile, names: Sequence[str]) -> None:
    actors = []
    for name in names:
        try:
            actors.append(ray.get_actor(name, namespace=fleet.namespace))
        except (ValueError, ray.exceptions.RayError):
            continue
    stopping = [actor.stop.remote(_STOP_SECONDS) for actor in actors]
    if stopping:
        ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_SECONDS + _ANSWER_SECONDS)
    for actor in actors:
        ray.kill(actor, no_restart=True)
    until = time.monotonic() + _STOP_SECONDS
    while set(names) & set(_present(fleet)):
        if time.monotonic() > until:
            raise DaemonUnavailable(f"Ray did not end {', '.join(names)} within {_STOP_SECONDS:g} s")
        time.sleep(0.1)

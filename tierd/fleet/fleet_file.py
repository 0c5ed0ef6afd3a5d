"""The file that describes a fleet: which workers and nodes there are to be, where, and what they are told."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tierd.addresses import Address, parse_address
from tierd.errors import UsageError
from tierd.sizes import parse_bytes
from tierd.small_files import read_at_most

__all__ = [
    "HERE", "Entrance", "FleetFile", "Members", "NodeGroup", "Patience", "Protection", "Setting", "WorkerGroup",
    "flags", "read_fleet",
]  # fmt: skip

HERE: Final = "host"
"""In place of a host: the one on which Ray has put the actor, by its address in the cluster."""

_NAME: Final = r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$"
_SETTING: Final = re.compile(r"[a-z][a-z0-9_]{0,40}")
_MAX_FILE_BYTES: Final = 1 << 20
_OURS: Final = frozenset({"listen", "http", "worker", "config"})
"""Settings that the fleet itself gives."""


def _checked(text: str, what: str) -> str:
    try:
        address = parse_address(text, option=what)
    except UsageError as error:
        raise ValueError(error.message) from None
    if address.path is not None:
        raise ValueError(f"{what} is HOST:PORT, not a Unix socket")
    return text


def _place(text: str, info: ValidationInfo) -> str:
    return _checked(text, info.field_name or "")


Name = Annotated[str, Field(pattern=_NAME)]
Place = Annotated[str, AfterValidator(_place)]
"""HOST:PORT."""
Resources = dict[str, Annotated[float, Field(ge=0.0001, le=1e6)]]
"""Of Ray, by name."""
Setting = str | int | float | bool | list[str]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Members(_Table):
    """Some actors that are alike.

    Attributes:
        name: of the group; its members are called after it, from 0 on.
        store: what each of them is given as STORE.
        on: resources of Ray that each takes from its host, such as `{"store-a" = 1}`: so they stand where they should.
        replicas: how many.
        settings: further settings of the command, by the names that they have in its own TOML file.
    """

    name: Name
    store: str
    on: Resources = {}
    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    settings: dict[str, Setting] = {}

    @field_validator("settings")
    @classmethod
    def _known(cls, given: dict[str, Setting]) -> dict[str, Setting]:
        for name in given:
            if name in _OURS or _SETTING.fullmatch(name) is None:
                raise ValueError(f"{name!r} is no setting that can be given here")
        return given

    @property
    def members(self) -> list[str]:
        """Their names."""
        return [f"{self.name}-{number}" for number in range(self.replicas)]


class WorkerGroup(Members):
    """Workers beside one daemon.

    Attributes:
        listen: where nodes connect; `host:0` is any port of the host that Ray has chosen.
    """

    listen: Place = "127.0.0.1:0"


class NodeGroup(Members):
    """Nodes that answer requests.

    Attributes:
        http: where the entrance finds them; `host:0` is any port of the host that Ray has chosen.
        workers: groups of workers that compute for them; without any, experts come from `store` alone.
    """

    http: Place = "127.0.0.1:0"
    workers: tuple[Name, ...] = ()


class Entrance(_Table):
    """Ray Serve in front of the nodes.

    Attributes:
        http: where it answers.
        location: on the first host of the cluster, or on each that has a replica of it.
        replicas: processes that pass requests on.
        on: resources of Ray that each of these takes.
        max_requests: at once in each of them; as many again wait, more are refused.
        max_body: of a request, bytes or such as `8MiB`.
        answer_seconds: bound on an answer.
        patience: seconds that a request waits while no node can be reached.
    """

    http: Place = "127.0.0.1:8000"
    location: Literal["HeadOnly", "EveryNode"] = "HeadOnly"
    replicas: Annotated[int, Field(ge=1, le=256)] = 1
    on: Resources = {}
    max_requests: Annotated[int, Field(ge=1, le=16384)] = 256
    max_body: str = "8MiB"
    answer_seconds: Annotated[float, Field(ge=0.1, le=86400)] = 3600.0
    patience: Annotated[float, Field(ge=0, le=3600)] = 60.0

    @property
    def address(self) -> Address:
        """Where it answers."""
        return parse_address(self.http, option="http")

    @property
    def max_body_bytes(self) -> int:
        """`max_body` as a number."""
        return parse_bytes(self.max_body, option="max_body")


class Patience(_Table):
    """When a member counts as ill.

    Attributes:
        start_seconds: bound on its start.
        look_seconds: between two looks at it.
        answer_seconds: in which it has to answer a look.
        failures: looks without an answer after which it is ended, and Ray starts it again.
    """

    start_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0
    look_seconds: Annotated[float, Field(ge=0.1, le=3600)] = 2.0
    answer_seconds: Annotated[float, Field(ge=0.1, le=3600)] = 10.0
    failures: Annotated[int, Field(ge=1, le=1000)] = 3


class Protection(_Table):
    """What keeps strangers out between nodes, workers and daemons: settings of all members, unless theirs differ.

    Files are those of the host that a member stands on. Daemons have theirs by their own command line.

    Attributes:
        tls_cert: PEM file of the certificate that a worker shows.
        tls_key: PEM file of its key.
        tls_ca: PEM file of the authorities that have signed certificates of workers and daemons.
        tls_name: that these certificates must have; "": the name or number that they are reached by.
        token_file: its first token is shown to workers and daemons; workers admit who shows one of them.
    """

    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_name: str = ""
    token_file: str = ""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key go together")
        if self.tls_cert and not self.tls_ca:
            raise ValueError("without tls_ca nodes cannot know a worker by tls_cert")
        return self

    def of_nodes(self) -> dict[str, Setting]:
        """Settings of nodes."""
        return _given(self, "tls_ca", "tls_name", "token_file")

    def of_workers(self) -> dict[str, Setting]:
        """Settings of workers."""
        return _given(self, "tls_cert", "tls_key", "tls_ca", "tls_name", "token_file")


class FleetFile(_Table):
    """A fleet.

    Attributes:
        name: also of its namespace in Ray, and of the entrance's application.
        ray: `own`: a cluster of this host alone, for as long as `tierd fleet up` runs; `auto`: the one that this host
            belongs to; or HOST:PORT of a cluster.
        worker: groups of workers.
        node: groups of nodes.
        entrance: in front of the nodes.
        patience: with members that do not answer.
        protection: between members, and between them and daemons.
        insecure: Ray's and the entrance's addresses may be reached from other hosts; nothing there asks for a token
            unless Ray was started with one.
    """

    name: Name
    ray: str = "own"
    worker: tuple[WorkerGroup, ...] = ()
    node: tuple[NodeGroup, ...] = Field(min_length=1)
    entrance: Entrance = Entrance()
    patience: Patience = Patience()
    protection: Protection = Protection()
    insecure: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = [group.name for group in (*self.worker, *self.node)]
        if len(set(names)) < len(names):
            raise ValueError("each group needs a name of its own")
        known = {group.name for group in self.worker}
        for group in self.node:
            unknown = set(group.workers) - known
            if unknown:
                raise ValueError(
                    f"the nodes {group.name} name workers that are not there: {', '.join(sorted(unknown))}"
                )
        if self.ray not in ("own", "auto"):
            _checked(self.ray, "ray")
        if not self.entrance.address.local and not self.insecure:
            raise ValueError(
                f"the entrance at {self.entrance.http} can be reached from other hosts: say insecure = true if that is "
                "meant, and give the nodes api_key_file"
            )
        return self

    @property
    def namespace(self) -> str:
        """Where its actors have their names."""
        return f"tierd-{self.name}"


def flags(settings: Mapping[str, Setting]) -> list[str]:
    """Settings of a command as words of its command line."""
    words = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        for single in value if isinstance(value, list) else [value]:
            if isinstance(single, bool):
                words += [flag] * single
            else:
                words += [flag, str(single)]
    return words


def _given(table: _Table, *names: str) -> dict[str, Setting]:
    """Those of a table's values that are not empty, by name."""
    return {name: value for name in names if (value := getattr(table, name))}


def read_fleet(path: Path) -> FleetFile:
    """The fleet that a TOML file describes.

    Raises:
        UsageError: it cannot be read, or says something that cannot be.
    """
    try:
        return FleetFile(**tomllib.loads(read_at_most(path, _MAX_FILE_BYTES).decode("utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as a fleet: {error}") from error
    except TypeError as error:
        raise UsageError(f"{path}: {error}") from error
    except ValidationError as error:
        first: Any = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path}: {place + ': ' if place else ''}{first['msg']}") from error

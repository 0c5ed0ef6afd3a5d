"""Settings come from a flag, else the environment, else a TOML file, else the default: the same names everywhere."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self, cast

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, InitSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from tierd.errors import UsageError
from tierd.path_arguments import holds_path
from tierd.small_files import read_at_most

__all__ = ["HistoryMode", "LayeredSettings", "PrefetchMode", "ProfileMode", "ServeSettings"]

_MAX_FILE_BYTES = 1 << 20


class HistoryMode(StrEnum):
    """What a daemon does with the usage history."""

    OFF = "off"
    READ = "read"
    ON = "on"


class PrefetchMode(StrEnum):
    """What a daemon does with hints, and whether it makes guesses."""

    OFF = "off"
    ON = "on"
    AUTO = "auto"


class ProfileMode(StrEnum):
    """Whether settings that `tierd tune` found are used."""

    AUTO = "auto"
    OFF = "off"


_FILE_KEY = "_from_file"


class LayeredSettings(BaseSettings):
    """Base of all settings: `load` puts flags over environment over file over defaults."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_empty_path(cls, value: Any, about: ValidationInfo) -> Any:
        """An empty one would be the working directory, which nobody means."""
        if about.field_name is not None and holds_path(cls.model_fields[about.field_name].annotation):
            several = isinstance(value, (list, tuple))
            if value == "" or (several and "" in value):
                raise PydanticCustomError("empty_path", "it is empty, and names no file or directory")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The order of precedence, highest first; dotenv files and secret folders are not read."""
        del dotenv_settings, file_secret_settings
        given = init_settings() if isinstance(init_settings, InitSettingsSource) else {}
        from_file = given.pop(_FILE_KEY, {})
        return (
            InitSettingsSource(settings_cls, given),
            env_settings,
            InitSettingsSource(settings_cls, from_file),
        )

    @classmethod
    def load(
        cls, *, config: Path | None, table: str, flags: dict[str, Any], tuned: Mapping[str, Any] | None = None
    ) -> Self:
        """The settings in force.

        Args:
            config: a TOML file, or None.
            table: the table of that file which holds these settings, such as `serve`.
            flags: what the command line gave; None means not given.
            tuned: defaults that were found best for this machine; they give way to everything else.

        Raises:
            UsageError: the file cannot be read, or a value or name is wrong; says which one and where it came from.
        """
        from_file = {**(tuned or {}), **(_read_table(config, table) if config is not None else {})}
        given = {name: value for name, value in flags.items() if value is not None}
        values: dict[str, Any] = {_FILE_KEY: from_file} | given
        try:
            return cast("Any", cls)(**values)  # type: ignore[no-any-return]
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden" and config is not None and name in from_file:
                raise _unknown(config, table, name, tuple(cls.model_fields)) from error
            prefix = cls.model_config.get("env_prefix", "")
            raise UsageError(
                f"setting {name}: {first['msg']}",
                hint=f"It is given as --{name.replace('_', '-')}, {prefix}{name.upper()}, or {name} under [{table}].",
            ) from error


def _unknown(config: Path, table: str, name: str, known: tuple[str, ...]) -> UsageError:
    near = get_close_matches(name.replace("-", "_"), known, n=3, cutoff=0.7)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"It knows {', '.join(sorted(known))}."
    return UsageError(f"{config}: [{table}] has no setting {name}", hint=hint)


def _read_table(config: Path, table: str) -> dict[str, Any]:
    try:
        content = tomllib.loads(read_at_most(config, _MAX_FILE_BYTES).decode("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{config}: cannot be read as settings: {error}") from error
    values = content.get(table, {})
    if not isinstance(values, dict):
        raise UsageError(f"{config}: [{table}] must be a table of settings")
    return values


class ServeSettings(LayeredSettings):
    """What `tierd serve` can be told."""

    model_config = SettingsConfigDict(env_prefix="TIERD_", extra="forbid", frozen=True)

    listen: str = Field("", description="where nodes connect: unix:PATH or HOST:PORT")
    tls_cert: Path | None = Field(
        None, description="PEM file with the daemon's certificate; read again when it changes"
    )
    tls_key: Path | None = Field(None, description="PEM file with the key of that certificate")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of the authorities whose certificates nodes must have; without it they need none"
    )
    token_file: Path | None = Field(None, description="file of tokens, one of which every node must show")
    insecure: bool = Field(False, description="listen beyond this host without TLS and tokens")
    reflection: bool = Field(False, description="let clients ask which calls there are (gRPC reflection)")
    local: str = Field("", description="where this host's nodes and operators connect if --listen is for others")
    http: str = Field("127.0.0.1:9480", description="where /metrics, /healthz and /readyz answer; `off` for nowhere")
    arena: str = Field("25%", description="RAM for expert bytes: an amount, or a share of the model's experts")
    ram: str = Field("", description="RAM of the whole daemon: an amount, a share of the host, or `auto`")
    arena_dir: Path | None = Field(None, description="tmpfs directory for the arena; without it, anonymous memory")
    policy: str = Field("expected-frequency", description="who leaves RAM")
    drive_threads: int | None = Field(
        None, ge=1, le=64, description="reads in flight per drive; without it, what a short measurement finds best"
    )
    direct: bool = Field(True, description="read drives past the page cache where that is possible")
    profile: ProfileMode = Field(
        ProfileMode.AUTO, description="`auto` uses what `tierd tune` found, where nothing else is said; `off` does not"
    )
    mirror: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="directories with copies of shards, each DIR or DIR=WEIGHT; in the environment with : between"
    )
    also: Annotated[tuple[Path, ...], NoDecode] = Field(
        (),
        description="directories with shards that the store's own directory lacks; in the environment with : between",
    )
    fault_plan: Path | None = Field(None, description="file that says which reads to damage on purpose, for tests")
    prefetch: PrefetchMode = Field(
        PrefetchMode.AUTO, description="hints of nodes: `off`, `on`, or `auto`, only as far as they shorten waits"
    )
    guess: PrefetchMode = Field(
        PrefetchMode.OFF, description="guesses for nodes that send no hints: `off`, `on`, or `auto`, while they pay"
    )
    history: HistoryMode = Field(
        HistoryMode.ON, description="usage history: `on`, `read` (never written) or `off`; it warms the next start"
    )
    state_dir: Path | None = Field(
        None, description="where the history lies; without it, beside the store or in the user's state directory"
    )
    pin: str = Field("none", description="file that names experts to keep in RAM, or `none`")
    deadline_seconds: float = Field(60.0, gt=0, le=3600, description="bound on an answer where the node names none")
    drain_seconds: float = Field(10.0, ge=0, le=600, description="bound on a graceful stop")
    max_sessions: int = Field(64, ge=1, le=4096, description="compute nodes at once")
    session_experts: int | None = Field(
        None, ge=1, description="experts that one node may hold at once because it asked; without it, what fits"
    )
    session_read_bytes: str = Field(
        "", description="bytes of one node's reads at the drives: an amount; without it, what its turns allow"
    )
    session_hints: int = Field(256, ge=0, le=1024, description="hinted experts of one node that wait to be read")
    keepalive_seconds: float = Field(
        10.0, ge=0.1, le=3600, description="silence after which a node is asked for a sign of life"
    )
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="least level that is logged")

    @field_validator("mirror", "also", mode="before")
    @classmethod
    def _paths(cls, value: Any) -> Any:
        return tuple(filter(None, value.split(os.pathsep))) if isinstance(value, str) else value

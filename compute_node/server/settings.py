"""Settings of the API: flag over environment (`TIERD_NODE_…`) over a TOML file's `[api]` over default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from tierd.errors import UsageError
from tierd.settings import LayeredSettings

__all__ = ["ApiSettings"]

_MAX_KEYS: Final = 1024
_MAX_KEY_BYTES: Final = 1 << 20

Texts = Annotated[tuple[str, ...], NoDecode]


class ApiSettings(LayeredSettings):
    """How `compute-node serve` meets its clients.

    Attributes:
        http: where it answers, HOST:PORT.
        model_name: by which names requests may call the model; the first is the one that answers carry.
        api_key: opens the API.
        api_key_file: file with keys, one a line; `#` begins a comment.
        insecure: listen beyond this host without a key.
        allowed_host: further names of this server, such as a proxy's.
        cors: origins of other sites whose pages may use the API.
        max_body: of a request, bytes or such as `8MiB`.
        max_connections: at once.
        client_seconds: how long a client may take to send a request, and leave an answer unread.
        answer_seconds: how long an answer may take.
        drain_seconds: how long answers that are under way may take when the server is stopped.
    """

    model_config = SettingsConfigDict(env_prefix="TIERD_NODE_", extra="forbid", frozen=True)

    http: str = "127.0.0.1:8000"
    model_name: Texts = ()
    api_key: str | None = None
    api_key_file: Path | None = None
    insecure: bool = False
    allowed_host: Texts = ()
    cors: Texts = ()
    max_body: str = "8MiB"
    max_connections: Annotated[int, Field(ge=1, le=65536)] = 512
    client_seconds: Annotated[float, Field(ge=0.1, le=3600)] = 30.0
    answer_seconds: Annotated[float, Field(ge=0.1, le=86400)] = 3600.0
    drain_seconds: Annotated[float, Field(ge=0, le=600)] = 10.0

    @field_validator("model_name", "allowed_host", "cors", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value

    def keys(self) -> tuple[str, ...]:
        """All keys that open the API.

        Raises:
            UsageError: the file cannot be read or holds none.
        """
        own = () if self.api_key is None else (self.api_key,)
        if any(not key.strip() for key in own):
            raise UsageError("--api-key: an empty key opens the API for everyone", hint="Give a key, or none at all.")
        if self.api_key_file is None:
            return own
        try:
            with self.api_key_file.open(encoding="utf-8") as file:
                lines = file.read(_MAX_KEY_BYTES).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file: {self.api_key_file} cannot be read: {error}") from None
        found = tuple(line for text in lines if (line := text.partition("#")[0].strip()))
        if not 0 < len(found) <= _MAX_KEYS:
            raise UsageError(f"--api-key-file: {self.api_key_file} holds {len(found)} keys, not 1 to {_MAX_KEYS}")
        return own + found

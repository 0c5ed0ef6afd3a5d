"""Settings of a compute node: flag over environment (`TIERD_NODE_…`) over a TOML file's `[node]` over default."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from tierd.settings import LayeredSettings

__all__ = ["NodeSettings"]


class NodeSettings(LayeredSettings):
    """What the commands of `compute-node` share.

    Attributes:
        numerics: `exact`, or `fast`: activations as signed bytes wherever weights are quantised.
        threads: native threads; None: the cores that the process may use.
        context: most tokens of a conversation; None: what the checkpoint was made for, at most 4096.
        rows: tokens of a prompt that are computed in one step.
        in_process: read the store without a daemon.
        arena: RAM for experts of a private daemon or of the process itself, as bytes or a share of all experts.
        patience: seconds to wait for a daemon that went away in the middle of an answer.
        messages: ask the daemon for every expert, instead of using those in its arena without a message.
        prefetch: tell the daemon which experts will probably be wanted: `on`, `off`, or `auto`, as far as it makes
            steps faster. Off until it has shown on real sizes that it pays.
        history: keep between runs which experts go with which tokens; it changes speed only.
        max_tokens: most tokens of an answer.
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        repetition_penalty: 1 is off.
        seed: of the draws; None: a new one each time, which is shown.
    """

    model_config = SettingsConfigDict(env_prefix="TIERD_NODE_", extra="forbid", frozen=True)

    numerics: Literal["exact", "fast"] = "exact"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    context: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    rows: Annotated[int, Field(ge=1, le=4096)] = 64
    in_process: bool = False
    arena: str | None = None
    patience: Annotated[float, Field(ge=0, le=86400)] = 60.0
    messages: bool = False
    prefetch: Literal["auto", "on", "off"] = "off"
    history: bool = True
    max_tokens: Annotated[int, Field(ge=1)] = 256
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    top_k: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None

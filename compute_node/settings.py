"""Settings of a compute node: flag over environment (`TIERD_NODE_…`) over a TOML file's `[node]` over default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from compute_node.kernel_choice import KernelChoice
from tierd.settings import LayeredSettings

__all__ = ["NodeSettings", "WorkerSettings"]


class NodeSettings(LayeredSettings):
    """What the commands of `compute-node` share.

    Attributes:
        engine: `native`: the program of the model's family; `transformers`: the authors' own code, with torch; `auto`:
            the first where there is one.
        device: that computes with `transformers`: `cpu`, `cuda`, `cuda:1`.
        vram: most bytes of experts that are kept on that device; None keeps none.
        numerics: `exact`, or `fast`: activations as signed bytes wherever weights are quantised.
        kernels: which machine code computes: `avx512`, `avx2` or `portable`; `auto`: the best for this processor. All
            compute the same bits.
        threads: native threads; None: the cores that the process may use.
        context: most tokens of a conversation; None: what the checkpoint was made for, at most 4096.
        kv_cache: RAM for the KV cache, as bytes or a share of this host's RAM; None: what all contexts take, at most a
            quarter of RAM.
        rows: tokens that are computed in one step: of a prompt, or of many requests.
        max_running: requests that a server computes at once.
        max_waiting: requests that wait beside them; more are refused.
        in_process: read the store without a daemon.
        arena: RAM for experts of a private daemon or of the process itself, as bytes or a share of all experts.
        patience: seconds to wait for a daemon that went away in the middle of an answer.
        messages: ask the daemon for every expert, instead of using those in its arena without a message.
        experts: how they come from a daemon: `arena`, its memory on the same host; `bytes`, fetched into this node's
            RAM; `worker`, computed beside their store; `auto`: the first of these that is possible here, between the
            last two the faster one.
        worker: workers of the daemon's store, each HOST:PORT or HOST:PORT=WEIGHT, also `dns:///NAME:PORT`, `ipv4:` with
            several of which one does the work, or @FILE with the address in it; in the environment with spaces or
            commas between.
        worker_seconds: after so long another one is asked for what a worker was asked for.
        store_cache: most bytes that a far node keeps on its disk of what it fetched of stores; 0 keeps nothing.
        tls_ca: PEM file of the authorities that sign the certificates of far daemons and workers.
        tls_name: that these certificates must have, where it is not the name or number by which their host is reached.
        tls_client_cert: PEM file of this node's own certificate, for those that want to see one.
        tls_client_key: PEM file of its key.
        token_file: file with the token that is shown to far daemons and workers.
        plaintext: speak with far daemons and workers without TLS.
        prefetch: tell the daemon which experts will probably be wanted: `on`, `off`, or `auto`, as far as it makes
            steps faster; `tokens` says which tokens a step computes on, for a daemon that guesses. Off until it has
            shown on real sizes that it pays.
        history: keep between runs which experts go with which tokens; it changes speed only.
        profile: use what `tierd tune` found for threads and prefetch, where nothing else is said: `auto` or `off`.
        max_tokens: most tokens of an answer.
        temperature: 0 is greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        repetition_penalty: 1 is off.
        seed: of the draws; None: a new one each time, which is shown.
    """

    model_config = SettingsConfigDict(env_prefix="TIERD_NODE_", extra="forbid", frozen=True)

    engine: Literal["auto", "native", "transformers"] = "auto"
    device: str = "cpu"
    vram: str | None = None
    numerics: Literal["exact", "fast"] = "exact"
    kernels: KernelChoice = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    context: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    kv_cache: str | None = None
    rows: Annotated[int, Field(ge=1, le=4096)] = 64
    max_running: Annotated[int, Field(ge=1, le=1024)] = 16
    max_waiting: Annotated[int, Field(ge=0, le=65536)] = 64
    in_process: bool = False
    arena: str | None = None
    patience: Annotated[float, Field(ge=0, le=86400)] = 60.0
    messages: bool = False
    experts: Literal["auto", "arena", "bytes", "worker"] = "auto"
    worker: Annotated[tuple[str, ...], NoDecode] = ()
    worker_seconds: Annotated[float, Field(gt=0, le=600)] = 2.0
    store_cache: str = "16GiB"
    tls_ca: Path | None = None
    tls_name: str = ""
    tls_client_cert: Path | None = None
    tls_client_key: Path | None = None
    token_file: Path | None = None
    plaintext: bool = False
    prefetch: Literal["auto", "on", "tokens", "off"] = "off"
    history: bool = True
    profile: Literal["auto", "off"] = "auto"
    max_tokens: Annotated[int, Field(ge=1)] = 256
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    top_k: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None

    @field_validator("worker", mode="before")
    @classmethod
    def _workers(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(
            worker
            for word in value.split()
            for worker in ([word.strip(",")] if word.startswith(("ipv4:", "ipv6:")) else word.split(","))
            if worker
        )


class WorkerSettings(LayeredSettings):
    """Settings of `compute-node worker`: flag over environment (`TIERD_WORKER_…`) over `[worker]` over default.

    Attributes:
        listen: where nodes connect: HOST:PORT or unix:PATH.
        tls_cert: PEM file of its certificate; read again when it changes.
        tls_key: PEM file of its key.
        tls_client_ca: PEM file of the authorities whose certificates nodes must have.
        token_file: tokens, one of which nodes must show; its first one is shown to the daemon, if that is far.
        tls_ca: PEM file of the authorities that sign the daemon's certificate, if that is far.
        tls_name: that this certificate must have, where it is not the name or number by which its host is reached.
        insecure: listen beyond this host without TLS and tokens.
        max_nodes: nodes at once.
        rows: most rows of one request.
        numerics: of the kernels; nodes with others are refused.
        kernels: which machine code they are, as for a node; nodes with another are refused.
        threads: native threads; None: the cores that the process may use.
        in_process: read the store without a daemon.
        arena: RAM for experts of a private daemon or of the process itself.
        patience: seconds to wait for a daemon that went away.
    """

    model_config = SettingsConfigDict(env_prefix="TIERD_WORKER_", extra="forbid", frozen=True)

    listen: str = ""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    token_file: Path | None = None
    tls_ca: Path | None = None
    tls_name: str = ""
    insecure: bool = False
    max_nodes: Annotated[int, Field(ge=1, le=4096)] = 64
    rows: Annotated[int, Field(ge=1, le=1024)] = 64
    numerics: Literal["exact", "fast"] = "exact"
    kernels: KernelChoice = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    in_process: bool = False
    arena: str | None = None
    patience: Annotated[float, Field(ge=0, le=86400)] = 60.0

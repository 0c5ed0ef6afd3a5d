"""What a node's settings become: options of its model, of answers, and of the way to other hosts."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Final

from compute_node.engine.cache_budget import memory_of_this_host
from compute_node.engine.generate import GenerationParams
from compute_node.engine.model import ModelOptions
from compute_node.engine.sampler import Sampling
from compute_node.settings import NodeSettings
from tierd.access import Access
from tierd.client.open import FarOptions
from tierd.sizes import parse_share

__all__ = ["far_options", "generation_params", "idle_far_options", "model_options"]

_OF_CONNECTIONS: Final = ("tls_ca", "tls_name", "tls_client_cert", "tls_client_key", "token_file", "plaintext")


def model_options(settings: NodeSettings, *, serving: bool = False) -> ModelOptions:
    """How the model is run: for one text, or `serving` as many at once as `max_running` says."""
    budget = settings.kv_cache
    options = ModelOptions(
        numerics=settings.numerics,
        context=settings.context,
        kv_cache=None if budget is None else parse_share(budget, whole=memory_of_this_host(), option="--kv-cache"),
        threads=settings.threads,
        rows=settings.rows,
        prefetch=settings.prefetch,
    )
    if not serving:
        return options
    running = settings.max_running
    return replace(options, sequences=running, rows=max(running, settings.rows), head_rows=running)


def generation_params(settings: NodeSettings, *, stop: list[str], ignore_eos: bool) -> GenerationParams:
    """What to generate; draws a seed if none was given."""
    return GenerationParams(
        max_tokens=settings.max_tokens,
        sampling=Sampling(
            repetition_penalty=settings.repetition_penalty,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            seed=secrets.randbits(63) if settings.seed is None else settings.seed,
        ),
        stop=tuple(stop),
        ignore_eos=ignore_eos,
    )


def far_options(settings: NodeSettings) -> FarOptions:
    """What a node is told of daemons and workers of other hosts."""
    return FarOptions(
        experts=settings.experts,
        workers=settings.worker,
        worker_seconds=settings.worker_seconds,
        store_cache=settings.store_cache,
        access=Access(
            ca=settings.tls_ca,
            certificate=settings.tls_client_cert,
            key=settings.tls_client_key,
            token_file=settings.token_file,
            plaintext=settings.plaintext,
            name=settings.tls_name,
        ),
    )


def idle_far_options(store: str, settings: NodeSettings) -> str:
    """A line for people where a store of this host, without workers, needs none of the certificates and tokens given.

    Args:
        store: as it was named.
        settings: in force.
    """
    given = [f"--{name.replace('_', '-')}" for name in _OF_CONNECTIONS if getattr(settings, name)]
    if not given or settings.worker or not (store.startswith("unix:") or Path(store).is_dir()):
        return ""
    return f"{store} is on this host, where nobody is shown a certificate or a token: no use for {', '.join(given)}"

"""Puts the server together: the opened model, the engine on it, and the application in front of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from compute_node.commands.applied_settings import generation_params
from compute_node.commands.opening import Opened
from compute_node.server.answering import ServingEngine
from compute_node.server.app import AccessRules, make_app
from compute_node.server.guard import ApiKeys, HostNames
from compute_node.server.http import HttpServer
from compute_node.server.mailbox import Mailbox
from compute_node.server.metrics import NodeMetrics
from compute_node.server.sampling import Defaults
from compute_node.server.service import Service
from compute_node.server.settings import ApiSettings
from compute_node.serving.engine import Engine
from compute_node.serving.requests import StepReport
from compute_node.settings import NodeSettings
from compute_node.text.chat_template import ChatTemplate
from compute_node.text.grammar import Grammars
from compute_node.text.parsers.choose import AnswerForm
from tierd import __version__
from tierd.addresses import Address, parse_address
from tierd.errors import UsageError
from tierd.sizes import parse_bytes

__all__ = ["Served", "check_address", "make_engine", "serving"]


@dataclass(frozen=True, slots=True)
class Served:
    """A server that listens.

    Attributes:
        http: answers from its `serve` on.
        engine: behind it.
        service: between the two.
    """

    http: HttpServer
    engine: ServingEngine
    service: Service


def check_address(api: ApiSettings) -> Address:
    """Where to listen.

    Raises:
        UsageError: no HOST:PORT, or beyond this host without a key.
    """
    address = parse_address(api.http, option="--http")
    if address.path is not None:
        raise UsageError("--http: the API listens on HOST:PORT, not on a Unix socket")
    keys = api.keys()
    if not (address.local or api.insecure or keys):
        raise UsageError(
            f"refusing to answer on {address} without an API key: anyone on the network could use this model",
            hint="Give --api-key-file or --api-key, or --insecure if this network is yours alone.",
        )
    return address


@contextmanager
def serving(
    opened: Opened, store: str, settings: NodeSettings, api: ApiSettings, loop: asyncio.AbstractEventLoop
) -> Iterator[Served]:
    """Engine and HTTP server of an opened model; the engine ends with the block.

    Args:
        opened: the model.
        store: as it was named, for the model's name.
        settings: of the node.
        api: of the API.
        loop: that the server will run on.

    Raises:
        UsageError: an address or a setting that cannot be used.
    """
    address = check_address(api)
    metrics = NodeMetrics(_facts(opened))
    engine = make_engine(opened, settings, metrics.stepped)
    with closing(engine):
        metrics.watch(engine.stats)
        service = _service(opened, store, settings, api, engine, Mailbox(loop, metrics.finished), metrics)
        rules = AccessRules(
            hosts=HostNames([address.host, *api.allowed_host], loopback=address.local),
            keys=ApiKeys(api.keys()),
            origins=api.cors,
            max_body=parse_bytes(api.max_body, option="--max-body"),
            body_seconds=api.client_seconds,
        )
        http = HttpServer(
            make_app(service, rules),
            address,
            connections=api.max_connections,
            head_seconds=api.client_seconds,
            read_seconds=api.client_seconds,
            drain_seconds=api.drain_seconds,
        )
        with closing(http):
            yield Served(http, engine, service)


def make_engine(opened: Opened, settings: NodeSettings, on_step: Callable[[StepReport], None]) -> ServingEngine:
    """What generates for many at once."""
    return Engine(
        opened.model,
        opened.tokenizer,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        on_step=on_step,
    )


def _service(
    opened: Opened,
    store: str,
    settings: NodeSettings,
    api: ApiSettings,
    engine: ServingEngine,
    mailbox: Mailbox,
    metrics: NodeMetrics,
) -> Service:
    model, tokenizer = opened.model, opened.tokenizer
    template = ChatTemplate.from_store(opened.source.store)
    stop_tokens = opened.generator.stop_tokens
    vocabulary = model.config.vocab_size
    given = "max_tokens" in settings.model_fields_set
    return Service(
        engine=engine,
        mailbox=mailbox,
        metrics=metrics,
        tokenizer=tokenizer,
        template=template,
        form=AnswerForm.of_template("" if template is None else template.source),
        grammars=None if tokenizer is None else Grammars(tokenizer, vocabulary, stop_tokens),
        names=api.model_name or (_name_of(store, opened),),
        context=model.context,
        vocabulary=vocabulary,
        stop_tokens=stop_tokens,
        defaults=Defaults(
            sampling=generation_params(settings, stop=[], ignore_eos=False).sampling,
            max_tokens=settings.max_tokens if given else None,
            answer_seconds=api.answer_seconds,
        ),
        started=int(time.time()),
        about=_facts(opened) | {"headline": opened.headline()},
    )


def _name_of(store: str, opened: Opened) -> str:
    """A directory's own name; of a daemon, which has no name, the family's."""
    path = Path(store)
    manifest = opened.source.store.manifest
    return path.absolute().name if path.is_dir() else manifest.family or manifest.model_type


def _facts(opened: Opened) -> dict[str, str]:
    manifest = opened.source.store.manifest
    return {
        "version": __version__,
        "family": opened.model.config.family,
        "expert_format": str(manifest.expert_format),
        "numerics": opened.model.numerics,
        "kernel_path": opened.kernel_path,
        "fingerprint": opened.source.store.fingerprint[:16],
    }

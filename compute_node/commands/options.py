"""Options that several commands share. Nothing that takes long to import: help is made of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from compute_node.kernel_choice import force_kernels
from compute_node.settings import NodeSettings
from tierd.errors import UsageError
from tierd.option_tables import Given, OptionTable

__all__ = [
    "MODEL",
    "RUN",
    "SAMPLING",
    "Arena",
    "Config",
    "InProcessFlag",
    "Kernels",
    "Numerics",
    "Seed",
    "Store",
    "Threads",
    "check_device",
    "load_settings",
    "unicode_text",
]

Store = Annotated[str, typer.Argument(help="Directory of a store, unix:PATH, or HOST:PORT of a daemon.")]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file; its table `node` gives defaults.")]
Numerics = Annotated[
    str | None, typer.Option("--numerics", help="exact (default), or fast: activations as bytes where weights are.")
]
Kernels = Annotated[
    str | None,
    typer.Option("--kernels", help="Machine code: avx512, avx2, portable, or auto (default); with the same bits."),
]
Threads = Annotated[int | None, typer.Option("--threads", help="Native threads. Default: the cores it may use.")]
InProcessFlag = Annotated[
    bool | None, typer.Option("--in-process/--no-in-process", help="Read the store without a daemon.")
]
Arena = Annotated[str | None, typer.Option("--arena", help="RAM for experts: 8GiB, or 25% of the model's experts.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Same seed, same draws.")]

SAMPLING: Final[OptionTable] = {
    "max_tokens": Annotated[int | None, typer.Option("--max-tokens", help="Most tokens of an answer. Default: 256.")],
    "temperature": Annotated[float | None, typer.Option("--temperature", help="0 (default): the likeliest token.")],
    "top_k": Annotated[
        int | None, typer.Option("--top-k", help="Draw among the k likeliest tokens only. Default: 0, all.")
    ],
    "top_p": Annotated[
        float | None,
        typer.Option("--top-p", help="Draw among the likeliest that reach this probability. Default: 1, all."),
    ],
    "min_p": Annotated[
        float | None,
        typer.Option("--min-p", help="Leave out what is less likely than this, by the best. Default: 0, nothing."),
    ],
    "repetition_penalty": Annotated[
        float | None, typer.Option("--repetition-penalty", help="Above 1: avoid tokens seen before. Default: 1.")
    ],
}
"""How tokens are drawn."""

MODEL: Final[OptionTable] = {
    "numerics": Numerics,
    "engine": Annotated[
        str | None,
        typer.Option(
            "--engine",
            help="native, transformers (the authors' own code; extra `torch`), or auto (default): the first.",
        ),
    ],
    "device": Annotated[
        str | None,
        typer.Option("--device", help="What computes with --engine transformers: cpu (default), cuda, cuda:1."),
    ],
    "vram": Annotated[
        str | None, typer.Option("--vram", help="Memory of that device for experts: 8GiB. Default: none.")
    ],
    "kernels": Kernels,
    "threads": Threads,
    "context": Annotated[
        int | None,
        typer.Option("--context", help="Most tokens of a conversation. Default: the model's own, at most 4096."),
    ],
    "kv_cache": Annotated[
        str | None, typer.Option("--kv-cache", help="RAM for the KV cache: 2GiB, or 10% of RAM. Default: at most 25%.")
    ],
    "in_process": InProcessFlag,
    "arena": Arena,
    "patience": Annotated[
        float | None, typer.Option("--patience", help="Seconds to wait for a daemon that went away. Default: 60.")
    ],
    "messages": Annotated[
        bool | None,
        typer.Option("--messages/--no-messages", help="Ask the daemon for experts that are in RAM, too. Default: no."),
    ],
    "prefetch": Annotated[
        str | None,
        typer.Option(
            "--prefetch",
            help="Hints to the daemon: on, off, auto (as far as they help), or tokens: it guesses itself. "
            "Default: off.",
        ),
    ],
    "profile": Annotated[
        str | None,
        typer.Option(
            "--profile", help="auto (default) uses what `tierd tune` found, where nothing else is said; or off."
        ),
    ],
}
"""How the model is run, and where its experts are."""

RUN: Final[OptionTable] = {
    name: MODEL[name] for name in ("numerics", "kernels", "threads", "context", "in_process", "arena")
}
"""The part of it that matters where nothing is written for people."""


def load_settings(config: Path | None, *given: Given, **flags: Any) -> NodeSettings:
    """Settings in force; flags that are None were not given."""
    for options in given:
        flags |= options
    settings = NodeSettings.load(config=config, table="node", flags=flags)
    check_device(settings.engine, settings)
    force_kernels(settings.kernels)
    return settings


def check_device(engine: str, settings: NodeSettings) -> None:
    """UsageError where the native engine is told of a device; asked again once `auto` has chosen."""
    if engine == "native" and (settings.vram is not None or settings.device != "cpu"):
        raise UsageError(
            "--vram and --device are for --engine transformers", hint="The native engine computes on the CPU."
        )


def unicode_text(argument: str, *, option: str) -> str:
    """A command line argument as UTF-8, whatever the locale made of its bytes; UsageError if it is not UTF-8."""
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from None
    except UnicodeEncodeError:
        # The locale's encoding cannot hold it, so it did not come through that locale: it is text already.
        return argument

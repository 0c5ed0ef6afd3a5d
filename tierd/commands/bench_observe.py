"""`tierd bench observe`: what looking on costs."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from tierd.drivebench.noise import OtherWork
from tierd.errors import UsageError
from tierd.observebench.brain_speed import brain_speed
from tierd.observebench.daemon_cost import daemon_cost
from tierd.sizes import format_share

__all__ = ["observe"]


def observe(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Short slices: a trial.")] = False,
    browser: Annotated[bool, typer.Option(help="Measure the page in Chromium, too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Measure a scrape, a viewer of the page, and the map of all experts in a browser.

    The daemon serves 76 layers of 256 experts to a client that visits 300 layers a second. A viewer's share of a core
    is what the daemon takes with an open page beyond what it takes without, in alternating slices.
    """
    others = OtherWork()
    answer: dict[str, Any] = {"brain_fps": None, "notes": []}
    with tempfile.TemporaryDirectory(prefix="tierd-observe-") as folder:
        answer |= daemon_cost(
            Path(folder), scrapes=5 if quick else 50, pairs=2 if quick else 8, seconds=0.5 if quick else 3.0
        )
    if browser:
        try:
            answer["brain_fps"] = brain_speed(1.0 if quick else 5.0)
        except UsageError as error:
            answer["notes"].append(str(error))
    others.judge(answer)
    if as_json:
        print(json.dumps(answer, indent=1, ensure_ascii=False))
        return
    print(f"a scrape       {answer['scrape_seconds'] * 1e3:.1f} ms, {answer['series']} series")
    print(f"a viewer       {format_share(answer['viewer_core_share'], digits=1)} of a core")
    print(f"the recorder   {format_share(answer['recorder_core_share'], digits=2)} of a core")
    for name, rate in (answer["brain_fps"] or {}).items():
        print(f"{name} experts {rate:.0f} frames/s")
    for note in answer["notes"]:
        print(note, file=sys.stderr)

"""Options in tables: the command's own signature, what it gets, and that each is a setting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from compute_node.commands import far_options, options, serve, worker
from compute_node.server.settings import ApiSettings
from compute_node.settings import NodeSettings, WorkerSettings
from tierd.commands import serve as daemon
from tierd.option_tables import Given, OptionTable, with_options
from tierd.settings import LayeredSettings, ServeSettings

_TABLE: OptionTable = {
    "size": Annotated[int | None, typer.Option("--size", help="How large.")],
    "name": Annotated[list[str] | None, typer.Option("--name", help="Repeat it.")],
    "fast": Annotated[bool | None, typer.Option("--fast/--slow", help="How fast.")],
}


def _run(*arguments: str) -> tuple[Path, Given, bool]:
    """What a command with the table gets."""
    got: list[Any] = []

    @with_options(given=_TABLE)
    def command(
        store: Annotated[Path, typer.Argument()],
        *,
        given: Given,
        loud: Annotated[bool, typer.Option("--loud")] = False,
    ) -> None:
        got.extend((store, given, loud))

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return tuple(got)  # type: ignore[return-value]


def test_options_of_a_table_reach_the_command_by_name() -> None:
    found = _run("here", "--size", "3", "--name", "a", "--name", "b", "--slow", "--loud")
    assert found == (Path("here"), {"size": 3, "name": ("a", "b"), "fast": False}, True)


def test_what_is_not_given_is_none() -> None:
    assert _run("here") == (Path("here"), {"size": None, "name": None, "fast": None}, False)


@pytest.mark.parametrize(
    ("table", "settings"),
    [
        (options.SAMPLING, NodeSettings),
        (options.MODEL, NodeSettings),
        (options.RUN, NodeSettings),
        (far_options.FAR, NodeSettings),
        (serve.ENGINE, NodeSettings),
        (serve.API, ApiSettings),
        (worker.OPTIONS, WorkerSettings),
        (daemon.OPTIONS, ServeSettings),
    ],
)
def test_each_option_is_a_setting(table: OptionTable, settings: type[LayeredSettings]) -> None:
    assert set(table) <= set(settings.model_fields)


@pytest.mark.parametrize(
    ("tables", "settings"),
    [((serve.API,), ApiSettings), ((worker.OPTIONS,), WorkerSettings), ((daemon.OPTIONS,), ServeSettings)],
)
def test_each_setting_is_an_option(tables: tuple[OptionTable, ...], settings: type[LayeredSettings]) -> None:
    assert set().union(*tables) == set(settings.model_fields)

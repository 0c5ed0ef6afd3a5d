"""Output fits a terminal's width, and carries no filling blanks into a pipe."""

from __future__ import annotations

import errno
import io

import typer
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from tierd.sizes import format_count, format_duration, format_share
from tierd.terminal import explain_unexpected, join_help_lines, show, show_hanging


def test_counts_and_shares_are_written_as_people_do():
    assert [format_count(n, "layer") for n in (0, 1, 19456)] == ["0 layers", "1 layer", "19,456 layers"]
    assert [format_share(0.444), format_share(0.9876, digits=1)] == ["44 %", "98.8 %"]


def test_durations_are_as_exact_as_people_care():
    written = {0: "0 s", 99: "99 s", 100: "2 min", 5940: "99 min", 5999: "1 h 40 min", 93_784: "26 h 3 min"}
    written |= {172_799: "2 d 0 h", 90_000_000: "1,041 d 16 h"}
    assert {seconds: format_duration(seconds) for seconds in written} == written


def table():
    grid = Table.grid(padding=(0, 2))
    grid.add_row("short", "a")
    grid.add_row("a longer name", "b" * 20)
    return grid


def test_lines_in_a_pipe_have_no_trailing_blanks():
    piped = io.StringIO()
    show(Console(file=piped, width=120), table())
    assert piped.getvalue() == f"short          a\na longer name  {'b' * 20}\n"


def test_long_lines_go_on_further_in_on_a_terminal_and_stay_whole_in_a_pipe():
    line = "limit     " + "word " * 30 + "end"
    seen, piped = io.StringIO(), io.StringIO()
    show_hanging(Console(file=seen, width=60, force_terminal=True, no_color=True), line, indent=10)
    show_hanging(Console(file=piped, width=60), line, indent=10)
    first, *others = seen.getvalue().splitlines()
    assert first.startswith("limit")
    assert len(others) == 3
    assert all(other[:10].isspace() and other[10] != " " and len(other) <= 60 for other in others)
    assert piped.getvalue() == line + "\n"


def test_help_wraps_at_the_width_alone(monkeypatch):
    app = typer.Typer()
    group = typer.Typer()

    @app.command()
    def first():
        """Say something.

        A line that ends here
        and goes on.
        """

    @group.command()
    def second():
        """Two
        lines.

        And a
        paragraph.
        """

    app.add_typer(group, name="group")
    join_help_lines(app)
    monkeypatch.setenv("COLUMNS", "80")
    assert "A line that ends here and goes on." in CliRunner().invoke(app, ["first", "--help"]).output
    assert "And a paragraph." in CliRunner().invoke(app, ["group", "second", "--help"]).output


def test_what_a_host_lacks_is_no_defect():
    assert explain_unexpected(OSError(errno.ENOSPC, "No space left on device"))[0] == "No space left on device"
    message, hint = explain_unexpected(OSError(errno.EMFILE, "Too many open files", "/nvme/store"))
    assert message == "/nvme/store: Too many open files"
    assert "ulimit -n" in hint
    assert "TasksMax=" in explain_unexpected(RuntimeError("can't start new thread"))[1]
    assert "defect" in explain_unexpected(RuntimeError("of ours"))[1]

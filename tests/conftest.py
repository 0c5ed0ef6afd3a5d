"""What every test relies on: the event loop, repeatable hypothesis runs, readable crashes, and skips that are named."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator

import pytest
import structlog
import uvloop
from hypothesis import HealthCheck, settings

pytest_plugins = ["daemons"]

# All of their tests bear the marker `oracle`, and torch, of that extra, decides what they are made of.
collect_ignore = (
    []
    if importlib.util.find_spec("torch")
    else [
        "integration/test_transformers.py",
        "integration/test_transformers_engine.py",
        "integration/test_twin_experts.py",
    ]
)

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}

# `deterministic` gives everyone the same examples; `make soak` asks for `explore`.
settings.register_profile(
    "deterministic",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, max_examples=500, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("deterministic")

# A child process that dies in native code says where.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

# A shell that starts the tests in the background has them ignore Ctrl-C, and programs inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Settings, sockets and state of whoever runs the tests stay out of them.
for variable in [name for name in os.environ if name.startswith("TIERD_") and not name.startswith("TIERD_TESTS_")]:
    del os.environ[variable]
SCRATCH = tempfile.TemporaryDirectory(prefix="tierd-tests-")
# Daemons of one test shall not be warm from another; tests of the history say what they want.
os.environ["TIERD_HISTORY"] = os.environ["TIERD_NODE_HISTORY"] = "off"
os.environ["XDG_RUNTIME_DIR"] = os.environ["XDG_STATE_HOME"] = SCRATCH.name

# A command that runs inside the tests' process sets up its log; loggers shall not keep it beyond that test.
_configure_log = structlog.configure


def configure_log(**settings):
    _configure_log(**{**settings, "cache_logger_on_first_use": False})


structlog.configure = configure_log


@pytest.fixture(autouse=True)
def default_log():
    """Undo what a test's command did to the log."""
    yield
    if structlog.is_configured():
        structlog.reset_defaults()


def pytest_unconfigure():
    SCRATCH.cleanup()


def pytest_addoption(parser):
    parser.addoption(
        "--event-loop",
        choices=sorted(LOOPS),
        default="uvloop",
        help="event loop of asyncio tests (add --asyncio-debug for asyncio's debug mode)",
    )
    parser.addoption(
        "--soak-seconds", type=float, default=0.0, metavar="S", help="let every stress test go on for S seconds"
    )


def pytest_asyncio_loop_factories(config, item):  # noqa: ARG001  # the hook's signature
    name = config.getoption("--event-loop")
    return {name: LOOPS[name]}


class Soak:
    """How long a stress test goes on: for its usual rounds or seconds in `make test`, and for longer in `make soak`.

    Attributes:
        seconds: as `--soak-seconds` says; 0 without it.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def rounds(self, usual: int) -> Iterator[int]:
        """Count rounds: the usual ones, or all that begin within the seconds, but no fewer."""
        until = time.monotonic() + self.seconds
        for number in itertools.count():
            if number >= usual and time.monotonic() >= until:
                return
            yield number

    def seed(self, usual: int) -> int:
        """The usual seed, or one that nobody has tried; it is printed."""
        seed = secrets.randbits(32) if self.seconds else usual
        print(f"seed {seed}")
        return seed


@pytest.fixture(scope="session")
def soak(pytestconfig) -> Soak:
    """Return how long a stress test goes on; such a test also bears the marker `stress`."""
    return Soak(pytestconfig.getoption("--soak-seconds"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if "soak" in getattr(item, "fixturenames", ()):
            item.add_marker("stress")


def skipped_tests(config) -> list[str]:
    """Return "name (reason)" of every test and test file that was skipped, in order."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    reasons = [r.longrepr[2] if isinstance(r.longrepr, tuple) else str(r.longrepr) for r in reports]
    return [f"{r.nodeid} ({reason.removeprefix('Skipped: ')})" for r, reason in zip(reports, reasons, strict=True)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    fail_on_skip = os.environ.get("TIERD_TESTS_FAIL_ON_SKIP", "0") not in {"", "0"}
    if fail_on_skip and session.exitstatus == pytest.ExitCode.OK and skipped_tests(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    skipped = skipped_tests(config)
    if skipped:
        count = f"{len(skipped)} {'test' if len(skipped) == 1 else 'tests'} skipped"
        terminalreporter.write_line(f"{count}: {'; '.join(skipped)}", yellow=True)
        if os.environ.get("TIERD_TESTS_FAIL_ON_SKIP", "0") not in {"", "0"}:
            terminalreporter.write_line("TIERD_TESTS_FAIL_ON_SKIP is set: a skipped test fails the run", red=True)

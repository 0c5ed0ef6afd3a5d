"""Logs: for people on a terminal, JSON lines otherwise; always on stderr, and never more than can be read."""

from __future__ import annotations

import logging
import sys

import structlog

from tierd.observe.log_limit import LINES, LogLimiter

__all__ = ["configure_logs"]


def configure_logs(level: str) -> None:
    """Set up structlog for the whole process.

    Args:
        level: debug, info, warning or error; what is below is not logged.
    """
    person = sys.stderr.isatty()
    last: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if person else structlog.processors.JSONRenderer(sort_keys=False)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            LogLimiter(LINES),
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if person else "iso", utc=not person),
            structlog.processors.format_exc_info,
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )

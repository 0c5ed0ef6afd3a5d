"""How panels are described, and the PromQL that most of them use.

`$instance` is the dashboards' variable, `$__rate_interval` Grafana's own.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["INSTANCE", "Dashboard", "Panel", "Query", "one", "quantiles", "rate", "value"]


class Query(NamedTuple):
    """One line of a panel.

    Attributes:
        expr: PromQL.
        legend: its name, with labels in double braces.
    """

    expr: str
    legend: str


class Panel(NamedTuple):
    """One picture.

    Attributes:
        title: of the panel.
        unit: Grafana's name of the unit.
        text: what to read from it, and what to do.
        queries: its lines.
        kind: `lines`, or `stat` for single numbers.
        stacked: whether the lines add up.
    """

    title: str
    unit: str
    text: str
    queries: tuple[Query, ...]
    kind: str = "lines"
    stacked: bool = False


INSTANCE = 'instance=~"$instance"'
_R = "[$__rate_interval]"


def rate(metric: str, by: str = "", where: str = "") -> str:
    """What a counter gains per second: summed, or by label."""
    matchers = f"{INSTANCE},{where}" if where else INSTANCE
    total = f"sum by ({by}) " if by else "sum"
    return f"{total}(rate({metric}{{{matchers}}}{_R}))" if by else f"sum(rate({metric}{{{matchers}}}{_R}))"


def value(metric: str, by: str = "", where: str = "") -> str:
    """A gauge as it is: summed, or by label."""
    matchers = f"{INSTANCE},{where}" if where else INSTANCE
    return f"sum by ({by}) ({metric}{{{matchers}}})" if by else f"sum({metric}{{{matchers}}})"


def quantiles(metric: str, by: str = "") -> tuple[Query, ...]:
    """Median and 99th percentile of a histogram."""
    groups = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        Query(
            f"histogram_quantile({q}, sum by ({groups}) (rate({metric}_bucket{{{INSTANCE}}}{_R})))",
            f"p{round(q * 100)}{legend}",
        )
        for q in (0.5, 0.99)
    )


def one(expr: str, legend: str) -> tuple[Query, ...]:
    """A single line."""
    return (Query(expr, legend),)


class Dashboard(NamedTuple):
    """One page of Grafana.

    Attributes:
        title: of the page.
        rows: panels by the name of their row.
        shown: what is chosen by the variable `$instance`, for people.
        metric: whose instances may be chosen.
    """

    title: str
    rows: dict[str, list[Panel]]
    shown: str = "Daemon"
    metric: str = "tierd_build_info"

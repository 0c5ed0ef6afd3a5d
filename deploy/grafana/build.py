"""Writes the Grafana dashboards from `panels.py`, with Grafana's own SDK.

    python deploy/grafana/build.py [FOLDER]

FOLDER is `dashboards` beside this file if none is given. The JSON is committed; a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig, VizLegendOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, StackingMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh
from panels import DASHBOARDS
from queries import Dashboard, Panel

SOURCE = DataSourceRef(type_val="prometheus", uid="prometheus")
WIDTH = 24
"""Of a Grafana row."""


def _queries(panel: Panel) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + number))
        for number, query in enumerate(panel.queries)
    ]


def _stat(panel: Panel) -> stat.Panel:
    reduce = ReduceDataOptions().calcs(["lastNotNull"])
    made = stat.Panel().title(panel.title).description(panel.text).unit(panel.unit).datasource(SOURCE)
    made = made.reduce_options(reduce).height(4).span(4)
    for query in _queries(panel):
        made = made.with_target(query)
    return made


def _lines(panel: Panel, across: int) -> timeseries.Panel:
    made = timeseries.Panel().title(panel.title).description(panel.text).unit(panel.unit).datasource(SOURCE)
    legend = VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
    made = made.legend(legend).min(0).height(8).span(WIDTH // across)
    if panel.stacked:
        made = made.stacking(StackingConfig().mode(StackingMode.NORMAL).group("A")).fill_opacity(25)
    for query in _queries(panel):
        made = made.with_target(query)
    return made


def build(uid: str, page: Dashboard) -> str:
    """One dashboard as JSON text."""
    made = (
        dashboard.Dashboard(page.title)
        .uid(uid)
        .tags(["tierd"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
    )
    variable = dashboard.QueryVariable("instance").label(page.shown).datasource(SOURCE).multi(True).include_all(True)
    variable = variable.query(f"label_values({page.metric}, instance)").all_value(".+")
    made = made.with_variable(variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED))
    for name, panels in page.rows.items():
        made = made.with_row(dashboard.Row(name))
        for panel in panels:
            made = made.with_panel(_stat(panel) if panel.kind == "stat" else _lines(panel, 2 if len(panels) < 3 else 3))
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"


def main() -> None:
    """Write every dashboard."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "dashboards"
    for uid, page in DASHBOARDS.items():
        (folder / f"{uid}.json").write_text(build(uid, page))


if __name__ == "__main__":
    main()

"""What the dashboards show: per dashboard its rows, per row its panels, per panel PromQL with a legend.

`$instance` is the dashboards' variable, `$__rate_interval` Grafana's own.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["DASHBOARDS", "Panel", "Query"]


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


_I = 'instance=~"$instance"'
_R = "[$__rate_interval]"


def _rate(metric: str, by: str = "", where: str = "") -> str:
    matchers = f"{_I},{where}" if where else _I
    total = f"sum by ({by}) " if by else "sum"
    return f"{total}(rate({metric}{{{matchers}}}{_R}))" if by else f"sum(rate({metric}{{{matchers}}}{_R}))"


def _value(metric: str, by: str = "", where: str = "") -> str:
    matchers = f"{_I},{where}" if where else _I
    return f"sum by ({by}) ({metric}{{{matchers}}})" if by else f"sum({metric}{{{matchers}}})"


def _quantiles(metric: str, by: str = "") -> tuple[Query, ...]:
    groups = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        Query(
            f"histogram_quantile({q}, sum by ({groups}) (rate({metric}_bucket{{{_I}}}{_R})))",
            f"p{round(q * 100)}{legend}",
        )
        for q in (0.5, 0.99)
    )


def _one(expr: str, legend: str) -> tuple[Query, ...]:
    return (Query(expr, legend),)


_STEPS = _rate("tierd_steps_total")
_REQUESTS = _rate("tierd_requests_total")
_UNASKED = _rate("tierd_unasked_hits_total")
_HITS = _rate("tierd_answers_total", where='outcome="hits"')

_OVERVIEW = {
    "Now": [
        Panel(
            "Steps per second",
            "ops",
            "A decode step makes one token of each sequence.",
            _one(_rate("tierd_steps_total"), "steps"),
            "stat",
        ),
        Panel(
            "Found in RAM",
            "percentunit",
            "Share of the experts asked for. More RAM raises it: see `tierd plan`.",
            _one(f"{_HITS} / {_REQUESTS}", "share"),
            "stat",
        ),
        Panel(
            "Read from drives",
            "Bps",
            "Bytes moved by all drives.",
            _one(_rate("tierd_drive_read_bytes_total"), "bytes"),
            "stat",
        ),
        Panel("Compute nodes", "none", "Connected now.", _one(_value("tierd_sessions"), "nodes"), "stat"),
        Panel(
            "Up since",
            "dateTimeFromNow",
            "Start of the daemon.",
            _one(f"max(tierd_start_time_seconds{{{_I}}}) * 1000", "start"),
            "stat",
        ),
        Panel(
            "Version",
            "none",
            "Version, store and policy.",
            _one(f"tierd_build_info{{{_I}}}", "{{version}} {{fingerprint}} {{policy}}"),
            "stat",
        ),
    ],
    "Where tokens wait": [
        Panel(
            "Experts asked for, by outcome",
            "ops",
            "Misses wait for a drive; failed ones need attention.",
            _one(_rate("tierd_answers_total", "outcome"), "{{outcome}}"),
            stacked=True,
        ),
        Panel(
            "Experts asked for, by phase",
            "ops",
            "Prefill asks for many experts at once.",
            (
                Query(_rate("tierd_requests_total", "phase"), "{{phase}}"),
                Query(_rate("tierd_unasked_hits_total"), "found without a message"),
                Query(_rate("tierd_repeated_requests_total"), "asked again"),
            ),
        ),
        Panel(
            "A layer's wait for its experts",
            "s",
            "From the request to its last expert.",
            _quantiles("tierd_layer_wait_seconds", "phase"),
        ),
        Panel("An expert's wait", "s", "By how it was come by.", _quantiles("tierd_expert_wait_seconds", "outcome")),
        Panel(
            "Waiting now",
            "none",
            "Requests without an answer, layers without room, reads under way.",
            (
                Query(_value("tierd_pending_requests"), "experts pending"),
                Query(_value("tierd_queued_acquires"), "layers queued"),
                Query(_value("tierd_reads_running"), "reads"),
            ),
        ),
        Panel("Event loop's lag", "s", "High values: the daemon lacks a core.", _quantiles("tierd_loop_lag_seconds")),
        Panel(
            "Lines of the log",
            "ops",
            "Many warnings: look at the log. Repeated lines are left out and counted.",
            (
                Query(_rate("tierd_log_lines_total", "level"), "{{level}}"),
                Query(_rate("tierd_log_lines_left_out_total"), "left out"),
            ),
        ),
    ],
}

_DRIVE = "drive"
_TIERS = {
    "RAM": [
        Panel(
            "Slots of the arena",
            "none",
            "Ready ones hold an expert.",
            _one(_value("tierd_arena_slots", "state"), "{{state}}"),
            stacked=True,
        ),
        Panel(
            "In use",
            "none",
            "Slots that a node holds, and pinned experts.",
            (Query(_value("tierd_arena_granted_slots"), "granted"), Query(_value("tierd_pinned_experts"), "pinned")),
        ),
        Panel(
            "Bytes",
            "bytes",
            "The budget, the arena, and how much of it lies on large pages.",
            (
                Query(_value("tierd_ram_bytes"), "budget"),
                Query(_value("tierd_arena_bytes"), "arena"),
                Query(_value("tierd_arena_huge_page_bytes"), "on 2 MiB pages"),
                Query(_value("tierd_arena_locked_bytes"), "locked"),
                Query(_value("tierd_arena_excess_bytes"), "not given back yet"),
            ),
        ),
        Panel(
            "Memory of the process",
            "bytes",
            "Swapped memory makes RAM slower than the drive.",
            (
                Query(_value("tierd_process_memory_bytes", "kind"), "{{kind}}"),
                Query(_value("tierd_host_swap_used_bytes"), "swap of the host"),
            ),
        ),
        Panel(
            "Left RAM",
            "ops",
            "Evictions by what the room was wanted for.",
            _one(_rate("tierd_evictions_total", "reason"), "{{reason}}"),
            stacked=True,
        ),
        Panel(
            "Wanted again after",
            "s",
            "From an eviction to the next request for the expert. Short: too little RAM.",
            _quantiles("tierd_eviction_regret_seconds"),
        ),
        Panel(
            "Given back to the host, written history",
            "ops",
            "Rare events of the daemon's housekeeping.",
            (
                Query(_rate("tierd_arena_punches_total"), "memory given back"),
                Query(_rate("tierd_history_saves_total"), "history written"),
                Query(_rate("tierd_recorder_events_total"), "events noted"),
            ),
        ),
        Panel(
            "Fence for reads without messages",
            "none",
            "0: the kernel lacks membarrier, and every hit costs a message.",
            _one(f"min(tierd_membarrier{{{_I}}})", "membarrier"),
        ),
    ],
    "Drives": [
        Panel(
            "Bytes read",
            "Bps",
            "By drive.",
            _one(_rate("tierd_drive_read_bytes_total", _DRIVE), "{{drive}}"),
            stacked=True,
        ),
        Panel("Reads", "ops", "Records read well.", _one(_rate("tierd_drive_reads_total", _DRIVE), "{{drive}}")),
        Panel("Time in a read", "s", "Checksum included.", _quantiles("tierd_drive_read_seconds", _DRIVE)),
        Panel(
            "Wait for a turn",
            "s",
            "A long queue asks for another mirror.",
            _quantiles("tierd_drive_queue_seconds", "tier"),
        ),
        Panel(
            "In flight, and what the drive delivers",
            "short",
            "As the daemon reckons now.",
            (
                Query(_value("tierd_drive_reads_in_flight", _DRIVE), "{{drive}} reads"),
                Query(_value("tierd_drive_bandwidth_bytes_per_second", _DRIVE), "{{drive}} bytes/s"),
            ),
        ),
        Panel(
            "State",
            "none",
            "Quarantined drives are probed until they are well.",
            (
                Query(_value("tierd_drives", "state"), "{{state}}"),
                Query(_value("tierd_drive_up", _DRIVE), "{{drive}} up"),
                Query(_value("tierd_drive_direct", _DRIVE), "{{drive}} direct"),
            ),
        ),
        Panel(
            "Trouble",
            "ops",
            "Errors by kind; wrong bytes were seen by no node.",
            (
                Query(_rate("tierd_drive_errors_total", "drive, kind"), "{{drive}} {{kind}}"),
                Query(_rate("tierd_drive_checksum_failures_total", _DRIVE), "{{drive}} wrong bytes"),
                Query(_rate("tierd_drive_stalls_total", _DRIVE), "{{drive}} stalls"),
            ),
        ),
        Panel(
            "What was done about it",
            "ops",
            "Tried again, sent elsewhere, or begun twice.",
            (
                Query(_rate("tierd_drive_retries_total", _DRIVE), "{{drive}} retries"),
                Query(_rate("tierd_drive_failovers_total", _DRIVE), "{{drive}} failovers"),
                Query(_rate("tierd_drive_hedges_total", "drive, outcome"), "{{drive}} hedges {{outcome}}"),
            ),
        ),
    ],
    "Under a fault plan": [
        Panel(
            "Reads damaged on purpose",
            "ops",
            "Only in tests.",
            _one(_rate("tierd_faults_injected_total", "drive, kind"), "{{drive}} {{kind}}"),
        ),
        Panel(
            "Bytes through the wrapper",
            "Bps",
            "Only in tests.",
            _one(_rate("tierd_fault_wrapper_bytes_total", _DRIVE), "{{drive}}"),
        ),
    ],
}

_PREFETCH = {
    "Does it pay": [
        Panel(
            "What became of hinted experts",
            "ops",
            "Used ones saved a wait; wasted ones cost a read.",
            _one(_rate("tierd_prefetch_outcomes_total", "outcome"), "{{outcome}}"),
            stacked=True,
        ),
        Panel(
            "The same in bytes",
            "Bps",
            "",
            _one(_rate("tierd_prefetch_outcome_bytes_total", "outcome"), "{{outcome}}"),
            stacked=True,
        ),
        Panel(
            "Hints",
            "ops",
            "Named, taken up, known already, or senseless.",
            (
                Query(_rate("tierd_prefetch_hinted_total"), "named"),
                Query(_rate("tierd_prefetch_issued_total"), "taken up"),
                Query(_rate("tierd_prefetch_known_total"), "known"),
                Query(_rate("tierd_prefetch_cut_total"), "cut"),
            ),
        ),
        Panel(
            "Given up",
            "ops",
            "By reason.",
            _one(_rate("tierd_prefetch_dropped_total", "reason"), "{{reason}}"),
            stacked=True,
        ),
        Panel("On their way", "none", "Taken up and not decided.", _one(_value("tierd_prefetch_pending"), "pending")),
        Panel("Taken up", "Bps", "Bytes.", _one(_rate("tierd_prefetch_issued_bytes_total"), "bytes")),
    ],
    "Warm start": [
        Panel(
            "Still to be read", "none", "From the history of earlier runs.", _one(_value("tierd_warm_left"), "experts")
        ),
        Panel(
            "Read while nobody waited",
            "ops",
            "",
            (Query(_rate("tierd_warm_reads_total"), "good"), Query(_rate("tierd_warm_failures_total"), "failed")),
        ),
    ],
}

_NODES = {
    "Compute nodes": [
        Panel("Connected", "none", "Sessions open now.", _one(_value("tierd_sessions", "instance"), "{{instance}}")),
        Panel("Coming", "ops", "Nodes admitted; many: they lose their connection.",
              _one(_rate("tierd_sessions_opened_total", "instance"), "{{instance}}")),
        Panel("Steps", "ops", "Of all attached nodes.", _one(_rate("tierd_steps_total", "instance"), "{{instance}}")),
        Panel("Experts per step", "none", "Asked for by message or found by themselves.",
              _one(f"{_REQUESTS} / {_STEPS}", "experts")),
        Panel("Messages saved", "percentunit", "Share of the hits that cost no message.",
              _one(f"{_UNASKED} / {_HITS}", "share")),
        Panel("Waiting for experts", "s", "Seconds that nodes' layers wait, per second.",
              _one(_rate("tierd_layer_wait_seconds_sum", "phase"), "{{phase}}"), stacked=True),
    ],
}  # fmt: skip

DASHBOARDS: dict[str, tuple[str, dict[str, list[Panel]]]] = {
    "tierd-overview": ("tierd overview", _OVERVIEW),
    "tierd-tiers": ("tierd tiers and drives", _TIERS),
    "tierd-prefetch": ("tierd prefetch", _PREFETCH),
    "tierd-nodes": ("tierd compute nodes", _NODES),
}
"""By uid: title, and rows of panels."""

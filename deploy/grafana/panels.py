"""What the daemon's dashboards show: per dashboard its rows, per row its panels, per panel PromQL with a legend."""

from __future__ import annotations

from node_panels import API
from queries import INSTANCE, Dashboard, Panel, Query, one, quantiles, rate, value

__all__ = ["DASHBOARDS"]

_STEPS = rate("tierd_steps_total")
_REQUESTS = rate("tierd_requests_total")
_UNASKED = rate("tierd_unasked_hits_total")
_HITS = rate("tierd_answers_total", where='outcome="hits"')

_OVERVIEW = {
    "Now": [
        Panel(
            "Steps per second",
            "ops",
            "A decode step makes one token of each sequence.",
            one(rate("tierd_steps_total"), "steps"),
            "stat",
        ),
        Panel(
            "Found in RAM",
            "percentunit",
            "Share of the experts asked for. More RAM raises it: see `tierd plan`.",
            one(f"{_HITS} / {_REQUESTS}", "share"),
            "stat",
        ),
        Panel(
            "Read from drives",
            "Bps",
            "Bytes moved by all drives.",
            one(rate("tierd_drive_read_bytes_total"), "bytes"),
            "stat",
        ),
        Panel("Compute nodes", "none", "Connected now.", one(value("tierd_sessions"), "nodes"), "stat"),
        Panel(
            "Up since",
            "dateTimeFromNow",
            "Start of the daemon.",
            one(f"max(tierd_start_time_seconds{{{INSTANCE}}}) * 1000", "start"),
            "stat",
        ),
        Panel(
            "Version",
            "none",
            "Version, store and policy.",
            one(f"tierd_build_info{{{INSTANCE}}}", "{{version}} {{fingerprint}} {{policy}}"),
            "stat",
        ),
    ],
    "Where tokens wait": [
        Panel(
            "Experts asked for, by outcome",
            "ops",
            "Misses wait for a drive; failed ones need attention.",
            one(rate("tierd_answers_total", "outcome"), "{{outcome}}"),
            stacked=True,
        ),
        Panel(
            "Experts asked for, by phase",
            "ops",
            "Prefill asks for many experts at once.",
            (
                Query(rate("tierd_requests_total", "phase"), "{{phase}}"),
                Query(rate("tierd_unasked_hits_total"), "found without a message"),
                Query(rate("tierd_repeated_requests_total"), "asked again"),
            ),
        ),
        Panel(
            "A layer's wait for its experts",
            "s",
            "From the request to its last expert.",
            quantiles("tierd_layer_wait_seconds", "phase"),
        ),
        Panel("An expert's wait", "s", "By how it was come by.", quantiles("tierd_expert_wait_seconds", "outcome")),
        Panel(
            "Waiting now",
            "none",
            "Requests without an answer, layers without room, reads under way.",
            (
                Query(value("tierd_pending_requests"), "experts pending"),
                Query(value("tierd_queued_acquires"), "layers queued"),
                Query(value("tierd_reads_running"), "reads"),
            ),
        ),
        Panel("Event loop's lag", "s", "High values: the daemon lacks a core.", quantiles("tierd_loop_lag_seconds")),
        Panel(
            "Lines of the log",
            "ops",
            "Many warnings: look at the log. Repeated lines are left out and counted.",
            (
                Query(rate("tierd_log_lines_total", "level"), "{{level}}"),
                Query(rate("tierd_log_lines_left_out_total"), "left out"),
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
            one(value("tierd_arena_slots", "state"), "{{state}}"),
            stacked=True,
        ),
        Panel(
            "In use",
            "none",
            "Slots that a node holds, and pinned experts.",
            (Query(value("tierd_arena_granted_slots"), "granted"), Query(value("tierd_pinned_experts"), "pinned")),
        ),
        Panel(
            "Bytes",
            "bytes",
            "The budget, the arena, and how much of it lies on large pages.",
            (
                Query(value("tierd_ram_bytes"), "budget"),
                Query(value("tierd_arena_bytes"), "arena"),
                Query(value("tierd_arena_huge_page_bytes"), "on 2 MiB pages"),
                Query(value("tierd_arena_locked_bytes"), "locked"),
                Query(value("tierd_arena_excess_bytes"), "not given back yet"),
            ),
        ),
        Panel(
            "Memory of the process",
            "bytes",
            "Swapped memory makes RAM slower than the drive.",
            (
                Query(value("tierd_process_memory_bytes", "kind"), "{{kind}}"),
                Query(value("tierd_host_swap_used_bytes"), "swap of the host"),
            ),
        ),
        Panel(
            "Left RAM",
            "ops",
            "Evictions by what the room was wanted for.",
            one(rate("tierd_evictions_total", "reason"), "{{reason}}"),
            stacked=True,
        ),
        Panel(
            "Wanted again after",
            "s",
            "From an eviction to the next request for the expert. Short: too little RAM.",
            quantiles("tierd_eviction_regret_seconds"),
        ),
        Panel(
            "Given back to the host, written history",
            "ops",
            "Rare events of the daemon's housekeeping.",
            (
                Query(rate("tierd_arena_punches_total"), "memory given back"),
                Query(rate("tierd_history_saves_total"), "history written"),
                Query(rate("tierd_recorder_events_total"), "events noted"),
            ),
        ),
        Panel(
            "Fence for reads without messages",
            "none",
            "0: the kernel lacks membarrier, and every hit costs a message.",
            one(f"min(tierd_membarrier{{{INSTANCE}}})", "membarrier"),
        ),
    ],
    "Drives": [
        Panel(
            "Bytes read",
            "Bps",
            "By drive.",
            one(rate("tierd_drive_read_bytes_total", _DRIVE), "{{drive}}"),
            stacked=True,
        ),
        Panel("Reads", "ops", "Records read well.", one(rate("tierd_drive_reads_total", _DRIVE), "{{drive}}")),
        Panel("Time in a read", "s", "Checksum included.", quantiles("tierd_drive_read_seconds", _DRIVE)),
        Panel(
            "Wait for a turn",
            "s",
            "A long queue asks for another mirror.",
            quantiles("tierd_drive_queue_seconds", "tier"),
        ),
        Panel(
            "In flight, and what the drive delivers",
            "short",
            "As the daemon reckons now.",
            (
                Query(value("tierd_drive_reads_in_flight", _DRIVE), "{{drive}} reads"),
                Query(value("tierd_drive_bandwidth_bytes_per_second", _DRIVE), "{{drive}} bytes/s"),
            ),
        ),
        Panel(
            "State",
            "none",
            "Quarantined drives are probed until they are well.",
            (
                Query(value("tierd_drives", "state"), "{{state}}"),
                Query(value("tierd_drive_up", _DRIVE), "{{drive}} up"),
                Query(value("tierd_drive_direct", _DRIVE), "{{drive}} direct"),
            ),
        ),
        Panel(
            "Trouble",
            "ops",
            "Errors by kind; wrong bytes were seen by no node.",
            (
                Query(rate("tierd_drive_errors_total", "drive, kind"), "{{drive}} {{kind}}"),
                Query(rate("tierd_drive_checksum_failures_total", _DRIVE), "{{drive}} wrong bytes"),
                Query(rate("tierd_drive_stalls_total", _DRIVE), "{{drive}} stalls"),
            ),
        ),
        Panel(
            "What was done about it",
            "ops",
            "Tried again, sent elsewhere, or begun twice.",
            (
                Query(rate("tierd_drive_retries_total", _DRIVE), "{{drive}} retries"),
                Query(rate("tierd_drive_failovers_total", _DRIVE), "{{drive}} failovers"),
                Query(rate("tierd_drive_hedges_total", "drive, outcome"), "{{drive}} hedges {{outcome}}"),
            ),
        ),
    ],
    "Under a fault plan": [
        Panel(
            "Reads damaged on purpose",
            "ops",
            "Only in tests.",
            one(rate("tierd_faults_injected_total", "drive, kind"), "{{drive}} {{kind}}"),
        ),
        Panel(
            "Bytes through the wrapper",
            "Bps",
            "Only in tests.",
            one(rate("tierd_fault_wrapper_bytes_total", _DRIVE), "{{drive}}"),
        ),
    ],
}

_HINTED_RIGHT = (
    rate("tierd_prefetch_outcomes_total", where='outcome=~"used|late"'),
    rate("tierd_prefetch_dropped_total", where='reason="overtaken"'),
)
_ABSENT = (
    rate("tierd_prefetch_outcomes_total", where='outcome="used"'),
    rate("tierd_answers_total", where='outcome=~"misses|joined"'),
)
_FORESEEN = f"({' + '.join(_HINTED_RIGHT)}) / ({' + '.join(_ABSENT)})"

_PREFETCH = {
    "Does it pay": [
        Panel(
            "What became of hinted experts",
            "ops",
            "Used ones saved a wait; wasted ones cost a read.",
            one(rate("tierd_prefetch_outcomes_total", "outcome"), "{{outcome}}"),
            stacked=True,
        ),
        Panel(
            "The same in bytes",
            "Bps",
            "",
            one(rate("tierd_prefetch_outcome_bytes_total", "outcome"), "{{outcome}}"),
            stacked=True,
        ),
        Panel(
            "Hints",
            "ops",
            "Named, taken up, known already, or senseless.",
            (
                Query(rate("tierd_prefetch_hinted_total"), "named"),
                Query(rate("tierd_prefetch_guessed_total"), "of these guessed by the daemon"),
                Query(rate("tierd_prefetch_issued_total"), "taken up"),
                Query(rate("tierd_prefetch_known_total"), "known"),
                Query(rate("tierd_prefetch_cut_total"), "cut"),
            ),
        ),
        Panel(
            "Given up",
            "ops",
            "By reason.",
            one(rate("tierd_prefetch_dropped_total", "reason"), "{{reason}}"),
            stacked=True,
        ),
        Panel(
            "Foreseen of misses",
            "percentunit",
            "Share of the absent experts that somebody had hinted for. Low: hints come too late, or are wrong.",
            one(_FORESEEN, "share"),
        ),
        Panel(
            "Throttles",
            "none",
            "0 is off: speculation does not pay now. 3 is the boldest.",
            one(value("tierd_prefetch_level", "instance, kind"), "{{instance}} {{kind}}"),
        ),
        Panel("On their way", "none", "Taken up and not decided.", one(value("tierd_prefetch_pending"), "pending")),
        Panel("On their way, in bytes", "bytes", "", one(value("tierd_prefetch_pending_bytes"), "pending")),
        Panel("Taken up", "Bps", "Bytes.", one(rate("tierd_prefetch_issued_bytes_total"), "bytes")),
        Panel(
            "Given up, in bytes",
            "Bps",
            "By reason.",
            one(rate("tierd_prefetch_dropped_bytes_total", "reason"), "{{reason}}"),
            stacked=True,
        ),
    ],
    "Warm start": [
        Panel(
            "Still to be read", "none", "From the history of earlier runs.", one(value("tierd_warm_left"), "experts")
        ),
        Panel(
            "Read while nobody waited",
            "ops",
            "",
            (Query(rate("tierd_warm_reads_total"), "good"), Query(rate("tierd_warm_failures_total"), "failed")),
        ),
    ],
}

_NODES = {
    "Compute nodes": [
        Panel("Connected", "none", "Sessions open now.", one(value("tierd_sessions", "instance"), "{{instance}}")),
        Panel("Coming", "ops", "Nodes admitted; many: they lose their connection.",
              one(rate("tierd_sessions_opened_total", "instance"), "{{instance}}")),
        Panel("Steps", "ops", "Of all attached nodes.", one(rate("tierd_steps_total", "instance"), "{{instance}}")),
        Panel("Experts per step", "none", "Asked for by message or found by themselves.",
              one(f"{_REQUESTS} / {_STEPS}", "experts")),
        Panel("Held back", "ops", "Reads that waited since their node had its share of bytes at the drives.",
              one(rate("tierd_held_reads_total", "instance"), "{{instance}}")),
        Panel("Messages saved", "percentunit", "Share of the hits that cost no message.",
              one(f"{_UNASKED} / {_HITS}", "share")),
        Panel("Waiting for experts", "s", "Seconds that nodes' layers wait, per second.",
              one(rate("tierd_layer_wait_seconds_sum", "phase"), "{{phase}}"), stacked=True),
    ],
}  # fmt: skip

DASHBOARDS: dict[str, Dashboard] = {
    "tierd-overview": Dashboard("tierd overview", _OVERVIEW),
    "tierd-tiers": Dashboard("tierd tiers and drives", _TIERS),
    "tierd-prefetch": Dashboard("tierd prefetch", _PREFETCH),
    "tierd-nodes": Dashboard("tierd compute nodes", _NODES),
    "tierd-api": API,
}
"""By uid."""

"""What the dashboard of serving nodes shows: `compute-node serve` and its engine."""

from __future__ import annotations

from queries import INSTANCE, Dashboard, Panel, Query, one, quantiles, rate, value

__all__ = ["API"]

_TOKENS = "compute_node_tokens_total"
_STEP = "compute_node_step_seconds_sum"
_WAITING = rate(_STEP, where='part="expert_wait"')

_ROWS = {
    "Now": [
        Panel("Tokens per second", "ops", "Of all answers together.",
              one(rate(_TOKENS, where='kind="generated"'), "tokens"), "stat"),
        Panel("Running", "none", "Requests that share the steps.",
              one(value("compute_node_requests_running"), "running"), "stat"),
        Panel("In the queue", "none", "Long: more nodes, or shorter answers.",
              one(value("compute_node_requests_waiting"), "waiting"), "stat"),
        Panel("Waits for experts", "percentunit", "Share of the steps' time. High: more RAM or another mirror.",
              one(f"{_WAITING} / {rate(_STEP)}", "share"), "stat"),
        Panel("Version", "none", "Version, model and machine code.",
              one(f"compute_node_build_info{{{INSTANCE}}}", "{{version}}"), "stat"),
    ],
    "What clients feel": [
        Panel("To the first token", "s", "Queue and prompt.", quantiles("compute_node_time_to_first_token_seconds")),
        Panel("Per token", "s", "After the first one.", quantiles("compute_node_time_per_token_seconds")),
        Panel("Whole requests", "s", "From submission to the end.", quantiles("compute_node_request_seconds")),
        Panel("In the queue", "s", "Until a request's turn.", quantiles("compute_node_queue_seconds")),
        Panel("Ends of requests", "ops", "Errors need attention; cancelled ones lost their client.",
              one(rate("compute_node_requests_ended_total", "outcome"), "{{outcome}}"), stacked=True),
        Panel("HTTP answers", "ops", "By endpoint and class.",
              one(rate("compute_node_http_responses_total", "endpoint, class"), "{{endpoint}} {{class}}")),
    ],
    "The engine": [
        Panel("Time in steps", "s", "Seconds per second, computing and waiting for experts.",
              one(rate(_STEP, "part"), "{{part}}"), stacked=True),
        Panel("A step", "s", "By part.", quantiles("compute_node_step_seconds", "part")),
        Panel("Rows of a step", "none", "Tokens computed together.", quantiles("compute_node_step_rows")),
        Panel("Requests of a step", "none", "That shared it.", quantiles("compute_node_step_requests")),
        Panel("Tokens", "ops", "Prompts computed, prompts found in the cache, answers.",
              one(rate(_TOKENS, "kind"), "{{kind}}"), stacked=True),
        Panel("Requests", "ops", "Taken, sent away since the queue was full, and pre-empted for want of pages.", (
            Query(rate("compute_node_requests_accepted_total"), "taken"),
            Query(rate("compute_node_requests_refused_total"), "sent away"),
            Query(rate("compute_node_preemptions_total"), "pre-empted"),
        )),
        Panel("Experts used, by tier", "ops", "Where they were found.",
              one(rate("compute_node_experts_total", "tier"), "{{tier}}"), stacked=True),
        Panel("Pages of the KV cache", "none", "64 tokens each.",
              one(value("compute_node_kv_pages", "state"), "{{state}}"), stacked=True),
        Panel("Bounds", "none", "As they were set.", (
            Query(value("compute_node_requests_running_limit"), "running at most"),
            Query(value("compute_node_requests_waiting_limit"), "waiting at most"),
        )),
    ],
}  # fmt: skip

API = Dashboard("compute nodes that serve an API", _ROWS, shown="Node", metric="compute_node_build_info")

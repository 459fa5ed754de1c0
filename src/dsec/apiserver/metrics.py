"""All metrics of the control plane, each with the question it answers. No label names a sandbox, a project or a user."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

# A series per counter that says when it began: nobody asks, and it doubles the page.
disable_created_metrics()  # type: ignore[no-untyped-call]

_CREATE_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_QUICK_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)


class Metrics:
    """One instance's metrics, in a registry of their own so that instances in one process do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.created = Counter(
            "dsec_sandboxes_created", "Sandboxes that came to run: is the fleet in use?", ["kind"], registry=registry
        )
        self.create_failed = Counter(
            "dsec_sandbox_create_failures",
            "Sandboxes that did not come to run, by error code.",
            ["code"],
            registry=registry,
        )
        self.create_seconds = Histogram(
            "dsec_sandbox_create_seconds",
            "From the request to a sandbox that runs: do clients wait?",
            buckets=_CREATE_BUCKETS,
            registry=registry,
        )
        self.ended = Counter(
            "dsec_sandboxes_ended", "Sandboxes that ended, by reason: who ends them?", ["reason"], registry=registry
        )
        self.exec = Counter(
            "dsec_execs",
            "Commands that ended, by reason (exit, signal, oom, timeout, killed).",
            ["reason"],
            registry=registry,
        )
        self.exec_overhead_seconds = Histogram(
            "dsec_exec_overhead_seconds",
            "Time of exec requests beyond the command's own: what does dsec add?",
            buckets=_QUICK_BUCKETS,
            registry=registry,
        )
        self.requests = Counter(
            "dsec_http_requests", "HTTP answers by route and status.", ["route", "status"], registry=registry
        )
        self.request_seconds = Histogram(
            "dsec_http_request_seconds",
            "Time to answer, by route; streams count until they end.",
            ["route"],
            buckets=_QUICK_BUCKETS,
            registry=registry,
        )
        self.errors = Counter("dsec_http_errors", "Error answers by code.", ["code"], registry=registry)
        self.alive = Gauge("dsec_sandboxes_alive", "Sandboxes alive now, by node.", ["edge"], registry=registry)
        self.memory_available = Gauge(
            "dsec_node_memory_available_bytes", "Memory a node has left.", ["edge"], registry=registry
        )
        self.events = Counter("dsec_events", "Events kept, by type.", ["type"], registry=registry)
        self.fenced = Counter(
            "dsec_changes_fenced", "Changes dropped because a newer one was kept: do edges fight?", registry=registry
        )

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)

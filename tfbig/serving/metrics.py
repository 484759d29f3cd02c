"""What Prometheus reads at /metrics."""

import prometheus_client as prometheus

# Seconds: from a small model's first token to a deadline of minutes.
_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self._registry = registry = prometheus.CollectorRegistry()
        self.requests = prometheus.Counter(
            "tfbig_requests", "Requests answered.", ["path", "status"], registry=registry
        )
        self.prompt_tokens = prometheus.Counter(
            "tfbig_prompt_tokens", "Tokens of prompts.", registry=registry
        )
        self.generation_tokens = prometheus.Counter(
            "tfbig_generation_tokens", "Tokens written.", registry=registry
        )
        self.steps = prometheus.Counter("tfbig_steps", "Steps of the engine.", registry=registry)
        self.running = prometheus.Gauge(
            "tfbig_texts_running", "Texts that are being written.", registry=registry
        )
        self.waiting = prometheus.Gauge(
            "tfbig_texts_waiting", "Texts that wait for a row.", registry=registry
        )
        self.first_token_seconds = prometheus.Histogram(
            "tfbig_time_to_first_token_seconds",
            "From request to first token.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self.request_seconds = prometheus.Histogram(
            "tfbig_request_seconds",
            "From request to the end of its answer.",
            ["path"],
            buckets=_BUCKETS,
            registry=registry,
        )

    def step(self, num_tokens: int, num_running: int, num_waiting: int) -> None:
        """Records a step of the engine."""
        self.steps.inc()
        self.generation_tokens.inc(num_tokens)
        self.running.set(num_running)
        self.waiting.set(num_waiting)

    def text(self) -> bytes:
        """Returns the page in Prometheus' text format."""
        return prometheus.generate_latest(self._registry)

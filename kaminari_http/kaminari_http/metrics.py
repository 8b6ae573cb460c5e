"""Prometheus metrics of one app, observed from the events that engines send and from their counters when scraped.

The engine knows nothing of this: it puts plain numbers on results. The registry is the app's own, so that many apps can live in
one process. Labels are `model` and `finish` only, never anything of a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kaminari_core.errors import KaminariError, QueueFullError, RequestError
from kaminari_core.flow import Result
from kaminari_core.serving import Serving

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


class Metrics:
    """Counters, histograms and gauges for the engines of one app, `engines` being keyed by served name."""

    def __init__(self, engines: Mapping[str, Serving]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "kaminari_requests", "Requests by how they ended.", ("model", "finish"), registry=self._registry
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of served requests, image tokens included.")
        self._generated_tokens = self._counter("generated_tokens", "Generated tokens of served requests.")
        self._proposed = self._counter("drafts_proposed", "Tokens that were guessed ahead.")
        self._accepted = self._counter("drafts_accepted", "Guessed tokens that the model then chose.")
        self._loops = self._counter("loops", "Replies that were ended because they repeated themselves.")
        self._first_token = self._histogram("time_to_first_token", "From submission to the first token.")
        self._gap = self._histogram("inter_token", "Between two tokens of one request.", GAP_SECONDS)
        self._total = self._histogram("request", "From submission to the end of the reply.")
        self._queue = self._histogram("queue", "From prepared to admitted to a slot.")
        self._window = self._histogram(
            "window", "Part of the queue in which the scheduler waits for others to join a batch."
        )
        self._prepare = self._histogram("prepare", "Decoding pictures and tokenizing.")
        self._prefill = self._histogram("prefill", "The vision tower and the prompt.")
        self._registry.register(_EngineGauges(engines))

    def observe_result(self, model: str, result: Result) -> None:
        """Count a request that was served or cancelled. Times are observed of complete replies only."""
        self._requests.labels(model, result.finish_reason).inc()
        self._prompt_tokens.labels(model).inc(result.usage.prompt_tokens)
        self._generated_tokens.labels(model).inc(result.usage.completion_tokens)
        self._loops.labels(model).inc(result.finish_detail == "loop")
        self._proposed.labels(model).inc(result.drafts.proposed)
        self._accepted.labels(model).inc(result.drafts.accepted)
        if result.finish_reason == "cancelled":
            return
        timings = result.timings
        self._first_token.labels(model).observe(timings.ttft)
        self._total.labels(model).observe(timings.total)
        self._queue.labels(model).observe(timings.queue)
        self._window.labels(model).observe(timings.window)
        self._prepare.labels(model).observe(timings.prepare)
        self._prefill.labels(model).observe(timings.prefill)

    def observe_failure(self, model: str, error: KaminariError) -> None:
        """Count a request that was not served: `refused` where the sender can do something about it, else `failed`."""
        finish = "refused" if isinstance(error, RequestError | QueueFullError) else "failed"
        self._requests.labels(model, finish).inc()

    def observe_gap(self, model: str, seconds: float, tokens: int) -> None:
        """Observe the time between two events of one request, the second of which brought `tokens` tokens."""
        for _ in range(tokens):
            self._gap.labels(model).observe(seconds / tokens)

    def render(self) -> bytes:
        """The text exposition format, of `CONTENT_TYPE`."""
        return generate_latest(_WithoutCreationTimes(self._registry))

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"kaminari_{name}", text, ("model",), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(f"kaminari_{name}_seconds", text, ("model",), registry=self._registry, buckets=buckets)


class _EngineGauges(Collector):
    """Reads each engine's counters when a scrape asks."""

    def __init__(self, engines: Mapping[str, Serving]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("kaminari_requests_running", "Requests that hold a slot.", labels=("model",))
        waiting = GaugeMetricFamily(
            "kaminari_requests_waiting", "Requests being prepared or queued.", labels=("model",)
        )
        slots = GaugeMetricFamily("kaminari_slots", "Requests that can be decoded together.", labels=("model",))
        busy = GaugeMetricFamily("kaminari_slots_busy", "Slots in use.", labels=("model",))
        ready = GaugeMetricFamily("kaminari_engine_ready", "1 when requests can be served, else 0.", labels=("model",))
        restarts = CounterMetricFamily(
            "kaminari_engine_restarts", "Times that an engine's process was replaced.", labels=("model",)
        )
        for name, engine in self._engines.items():
            stats = engine.stats()
            ready.add_metric((name,), engine.health().ready)
            restarts.add_metric((name,), stats.restarts)
            running.add_metric((name,), stats.running)
            waiting.add_metric((name,), stats.preparing + stats.waiting)
            slots.add_metric((name,), stats.slots)
            busy.add_metric((name,), stats.slots_busy)
        yield from (running, waiting, slots, busy, ready, restarts)


class _WithoutCreationTimes(CollectorRegistry):
    """A view of a registry without the `_created` series, which the client library can only switch off process-wide."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._source = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._source.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric

"""Metrics of a worker: vLLM's names where it has one, `loraplex_worker_*` for the rest."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from loraplex.api.output import Timings
from loraplex.api.residency import AdapterResidency, Tier
from loraplex_services.worker.server.sessions import ServerRequest
from loraplex_services.worker.server.status import StatusBoard
from loraplex_services.worker.types.messages import StepOutput, TokenOutput

MAX_ADAPTER_LABELS = 100
"""Number of adapters that are shown individually; the others are counted together."""

_LEVELS = {Tier.DEVICE: "gpu", Tier.HOST: "cpu"}
"""vLLM's names of tiers; the others are `disk`."""

_LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)

_TOKEN_BUCKETS = tuple(
    digit * 10**power for power in range(6) for digit in (1, 2, 5) if digit * 10**power <= 200_000
)


def _seconds(name: str, text: str) -> Histogram:
    return Histogram(name, text, buckets=_LATENCY_BUCKETS_S)


def _tokens(name: str, text: str) -> Histogram:
    return Histogram(name, text, buckets=_TOKEN_BUCKETS)


_running = Gauge("vllm:num_requests_running", "Requests in the batch")
_waiting = Gauge("vllm:num_requests_waiting", "Requests not yet in the batch")
_usage = Gauge("vllm:kv_cache_usage_perc", "Share of arena blocks in use, from 0 to 1")
_first_token = _seconds("vllm:time_to_first_token_seconds", "Time from arrival to the first token")
_inter_token = _seconds("vllm:inter_token_latency_seconds", "Time between two tokens")
_end_to_end = _seconds(
    "vllm:e2e_request_latency_seconds", "Time from arrival to the end of a request"
)
_queue = _seconds("vllm:request_queue_time_seconds", "Time from arrival to the first step")
_prefill = _seconds(
    "vllm:request_prefill_time_seconds", "Time from the first step to the first token"
)
_decode = _seconds("vllm:request_decode_time_seconds", "Time from the first token to the last")
_inference = _seconds(
    "vllm:request_inference_time_seconds", "Time from the first step to the last token"
)
_per_token = _seconds(
    "vllm:request_time_per_output_token_seconds", "Mean time between the tokens of a request"
)
_prompt_length = _tokens("vllm:request_prompt_tokens", "Prompt tokens of a request")
_output_length = _tokens("vllm:request_generation_tokens", "Generated tokens of a request")
_output_limit = _tokens("vllm:request_params_max_tokens", "max_tokens of a request")
_step_tokens = _tokens(
    "vllm:iteration_tokens_total",
    "Tokens of a step: generated tokens, and prompts that it completed",
)
_prefix_queries = Counter(
    "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
)
_prefix_hits = Counter("vllm:prefix_cache_hits", "Prompt tokens that were in the prefix cache")
_preempted = Counter("vllm:num_preemptions", "Requests preempted")
_drafted = Counter("vllm:spec_decode_num_draft_tokens", "Likely tokens that steps verified")
_accepted = Counter("vllm:spec_decode_num_accepted_tokens", "Of these, those that were right")
_prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens computed")
_generation_tokens = Counter("vllm:generation_tokens", "Tokens generated")
_success = Counter("vllm:request_success", "Requests that ended", ["finished_reason"])
_adapter_load = _seconds(
    "vllm:lora_adapter_load_seconds", "Time to copy an adapter from disk to the device"
)
_sessions = Gauge("loraplex_worker_sessions", "Open sessions of gateways")
_steps = Gauge("loraplex_worker_steps", "Engine steps since its start")
_step_s = Gauge("loraplex_worker_step_seconds", "Mean duration of recent steps")
_max_distinct = Gauge(
    "loraplex_worker_max_distinct_adapters",
    "Largest number of adapters in one step since the start",
)
_layer_stall_s = Gauge(
    "loraplex_worker_layer_stall_seconds",
    "Time for which steps have waited for adapters that were being copied, since the start",
)
_free_blocks = Gauge("loraplex_worker_free_blocks", "Arena blocks free or idle")


def observe_load(output: StepOutput, num_sessions: int) -> None:
    """Update the gauges from what the engine reports about itself."""
    load = output.load
    for copy_s in output.copies_s:
        _adapter_load.observe(copy_s)
    _running.set(load.running_requests)
    _waiting.set(load.waiting_requests)
    _usage.set(1.0 - load.free_blocks / max(1, load.total_blocks))
    _sessions.set(num_sessions)
    _steps.set(load.steps)
    _step_s.set(load.step_s)
    _max_distinct.set(load.max_distinct_adapters)
    _free_blocks.set(load.free_blocks)
    _layer_stall_s.set(output.layer_stall_s)
    _drafted.inc(output.drafted)
    _accepted.inc(output.accepted)


def observe_preemptions(before: int, now: int) -> None:
    """Add new preemptions to the counter. A new engine counts from 0."""
    _preempted.inc(now - before if now >= before else now)


def observe_submit(max_tokens: int) -> None:
    """A request arrived."""
    _output_limit.observe(max_tokens)


def observe_step(new: Sequence[tuple[ServerRequest, TokenOutput]], now: float) -> None:
    """Count the outputs of one step. Mutates: the requests' times and counts."""
    if not new:
        return
    num_prompt = sum(request.num_prompt for request, _ in new if request.first_token_s is None)
    num_output = sum(len(output.token_ids) for _, output in new)
    _step_tokens.observe(num_prompt + num_output)
    _generation_tokens.inc(num_output)
    for request, output in new:
        _observe_output(request, output, now)


def _observe_output(request: ServerRequest, output: TokenOutput, now: float) -> None:
    if request.first_token_s is None or request.last_token_s is None:
        request.first_token_s = now
        _first_token.observe(now - request.arrival_s)
        _prompt_tokens.inc(request.num_prompt)
        _prefix_queries.inc(request.num_prompt)
        _prefix_hits.inc(output.cached_tokens)
    else:
        _inter_token.observe(now - request.last_token_s)
    request.last_token_s = now
    request.num_output += len(output.token_ids)
    if output.finish_reason:
        _observe_end(request, output, now - request.first_token_s)
        _end_to_end.observe(now - request.arrival_s)
        count_end(output.finish_reason)


def _observe_end(request: ServerRequest, output: TokenOutput, decode_s: float) -> None:
    timings = output.timings or Timings()
    _queue.observe(timings.queue_s)
    _prefill.observe(timings.prefill_s)
    _decode.observe(decode_s)
    _inference.observe(timings.prefill_s + decode_s)
    _prompt_length.observe(request.num_prompt)
    _output_length.observe(request.num_output)
    if request.num_output > 1:
        _per_token.observe(decode_s / (request.num_output - 1))


def count_end(reason: str) -> None:
    """A request ended for `reason`."""
    _success.labels(reason).inc()


class OfModel(CollectorRegistry):
    """The process's metrics with the label `model_name` on vLLM's, by which its dashboards
    select."""

    def __init__(self, model_name: str) -> None:
        super().__init__()
        self._label = {"model_name": model_name}

    def collect(self) -> Iterable[Metric]:
        """Families are made again for each scrape, so they may be written to."""
        for family in REGISTRY.collect():
            if family.name.startswith("vllm:"):
                family.samples = [
                    sample._replace(labels=self._label | sample.labels) for sample in family.samples
                ]
            yield family


class AdapterCollector(Collector):
    """Reads adapter metrics from the status board when they are scraped."""

    def __init__(self, status: StatusBoard, max_loras: int) -> None:
        self._status = status
        self._max_loras = max_loras

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The residency metrics."""
        adapters = list(self._status.adapters())
        on_device = [a for a in adapters if a.tier == Tier.DEVICE]
        shown = sorted(adapters, key=lambda a: (-a.running_requests, -a.tier, a.digest))
        loaded = GaugeMetricFamily(
            "vllm:lora_adapter_loaded",
            "Where adapters are",
            labels=["adapter_name", "level", "pinned", "rank"],
        )
        for adapter in shown[:MAX_ADAPTER_LABELS]:
            level = _LEVELS.get(adapter.tier, "disk")
            labels = [adapter.digest, level, str(adapter.pinned).lower(), str(adapter.max_rank)]
            loaded.add_metric(labels, 1)
        if len(shown) > MAX_ADAPTER_LABELS:
            loaded.add_metric(["other", "", "", ""], len(shown) - MAX_ADAPTER_LABELS)
        yield loaded
        yield GaugeMetricFamily(
            "vllm:num_gpu_loaded_lora_adapters", "Adapters on the device", len(on_device)
        )
        yield GaugeMetricFamily(
            "vllm:max_gpu_lora_adapters", "Slots of the device tables", self._max_loras
        )
        yield self._requests_info(adapters)
        yield _by_tier(
            "loraplex_worker_adapters",
            "Adapters by the tier that is nearest to the device",
            {
                tier: sum(a.tier == tier for a in adapters)
                for tier in (Tier.DISK, Tier.HOST, Tier.LOADING, Tier.DEVICE)
            },
        )
        yield _by_tier(
            "loraplex_worker_adapter_bytes",
            "Bytes of adapters on each tier, which may hold the same adapters",
            {
                Tier.DISK: self._status.disk_bytes(),
                Tier.HOST: sum(a.host_bytes for a in adapters),
                Tier.DEVICE: sum(a.device_bytes for a in adapters),
            },
        )

    def _requests_info(self, adapters: list[AdapterResidency]) -> GaugeMetricFamily:
        running = sorted(a.digest for a in adapters if a.running_requests)[:MAX_ADAPTER_LABELS]
        waiting = sorted(a.digest for a in adapters if a.tier == Tier.LOADING)
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters in use; the value is the time of the report",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        labels = [str(self._max_loras), ",".join(running), ",".join(waiting[:MAX_ADAPTER_LABELS])]
        info.add_metric(labels, time.time())
        return info


def _by_tier(name: str, text: str, values: Mapping[Tier, int]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, text, labels=["tier"])
    for tier, value in values.items():
        gauge.add_metric([tier.name.lower()], value)
    return gauge

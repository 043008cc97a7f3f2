"""Names and bounds of what a worker tells Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from loraplex.api.output import FinishReason, Timings
from loraplex.api.residency import AdapterResidency, Tier, WorkerLoad
from loraplex_services.worker.server import metrics
from loraplex_services.worker.server.sessions import GatewaySession, ServerRequest
from loraplex_services.worker.server.status import StatusBoard
from loraplex_services.worker.types.messages import ResidencyChange, StepOutput, TokenOutput


def scrape() -> str:
    return generate_latest().decode()


def value_of(name: str) -> float:
    [line] = [line for line in scrape().splitlines() if line.startswith(f"{name} ")]
    return float(line.rpartition(" ")[2])


def test_load_and_tokens_appear_under_vllm_names() -> None:
    load = WorkerLoad(running_requests=3, waiting_requests=2, free_blocks=25, total_blocks=100)
    metrics.observe_load(StepOutput(1, [], [], [], load, copies_s=[0.01]), 1)
    assert value_of("vllm:num_requests_running") == 3
    assert value_of("vllm:num_requests_waiting") == 2
    assert value_of("vllm:kv_cache_usage_perc") == 0.75
    prompts, tokens = value_of("vllm:prompt_tokens_total"), value_of("vllm:generation_tokens_total")
    firsts = value_of("vllm:time_to_first_token_seconds_count")
    gaps = value_of("vllm:inter_token_latency_seconds_count")
    request = ServerRequest(GatewaySession(1, "g"), "r", (), 7, arrival_s=0.0)
    metrics.observe_step([(request, TokenOutput("r", [1], 0))], 0.5)
    metrics.observe_step(
        [(request, TokenOutput("r", [2], 1, finish_reason=FinishReason.LENGTH))], 0.6
    )
    assert value_of("vllm:prompt_tokens_total") - prompts == 7
    assert value_of("vllm:generation_tokens_total") - tokens == 2
    assert value_of("vllm:time_to_first_token_seconds_count") - firsts == 1
    assert value_of("vllm:inter_token_latency_seconds_count") - gaps == 1
    assert 'vllm:request_success_total{finished_reason="length"}' in scrape()


def sums() -> dict[str, float]:
    """Of all histograms and counters of vLLM's."""
    lines = [line for line in scrape().splitlines() if line.startswith("vllm:")]
    found = [line.partition(" ") for line in lines if "{" not in line]
    return {name: float(value) for name, _, value in found}


def test_the_phases_and_sizes_of_a_request_are_observed_when_it_ends() -> None:
    before = sums()
    request = ServerRequest(GatewaySession(1, "g"), "r", (), 7, arrival_s=10.0)
    metrics.observe_submit(64)
    first = TokenOutput("r", [1], 0, cached_tokens=4)
    last = TokenOutput(
        "r", [3], 2, finish_reason=FinishReason.STOP, timings=Timings(queue_s=0.25, prefill_s=0.5)
    )
    for now, output in ((10.75, first), (10.875, TokenOutput("r", [2], 1)), (11.0, last)):
        metrics.observe_step([(request, output)], now)
    grown = {name: value - before[name] for name, value in sums().items() if value != before[name]}
    expected = {
        "vllm:request_queue_time_seconds_sum": 0.25,
        "vllm:request_prefill_time_seconds_sum": 0.5,
        "vllm:request_decode_time_seconds_sum": 0.25,
        "vllm:request_inference_time_seconds_sum": 0.75,
        "vllm:request_time_per_output_token_seconds_sum": 0.125,
        "vllm:e2e_request_latency_seconds_sum": 1.0,
        "vllm:request_prompt_tokens_sum": 7,
        "vllm:request_generation_tokens_sum": 3,
        "vllm:request_params_max_tokens_sum": 64,
        "vllm:iteration_tokens_total_sum": 7 + 3,
        "vllm:iteration_tokens_total_count": 3,
        "vllm:prefix_cache_queries_total": 7,
        "vllm:prefix_cache_hits_total": 4,
    }
    assert {name: grown[name] for name in expected} == expected


def test_preemptions_add_up_over_engines() -> None:
    before = value_of("vllm:num_preemptions_total")
    for old, new in ((0, 3), (3, 3), (3, 5), (5, 2)):
        metrics.observe_preemptions(old, new)
    assert value_of("vllm:num_preemptions_total") - before == 7


def test_vllm_names_say_their_model_and_no_others_do() -> None:
    metrics.observe_load(StepOutput(1, [], [], [], WorkerLoad(running_requests=3)), 1)
    metrics.count_end("stop")
    lines = generate_latest(metrics.OfModel("org/base")).decode().splitlines()
    assert 'vllm:num_requests_running{model_name="org/base"} 3.0' in lines
    assert [line for line in lines if 'finished_reason="stop"' in line and "org/base" in line]
    samples = [line for line in lines if not line.startswith("#")]
    named = [line for line in samples if 'model_name="org/base"' in line]
    assert named == [line for line in samples if line.startswith("vllm:")]


def test_tiers_are_counted_and_measured() -> None:
    board = StatusBoard()
    board.disk_bytes = lambda: 700
    on_device = AdapterResidency("sha256:a", Tier.DEVICE, 8, device_bytes=256, host_bytes=200)
    on_host = AdapterResidency("sha256:b", Tier.HOST, 8, host_bytes=300)
    on_disk = AdapterResidency("sha256:c", Tier.DISK, 8)
    board.update(map(ResidencyChange, (on_device, on_host, on_disk)), WorkerLoad())
    registry = CollectorRegistry()
    registry.register(metrics.AdapterCollector(board, max_loras=4096))
    lines = set(generate_latest(registry).decode().splitlines())
    assert {
        'loraplex_worker_adapters{tier="disk"} 1.0',
        'loraplex_worker_adapters{tier="host"} 1.0',
        'loraplex_worker_adapters{tier="loading"} 0.0',
        'loraplex_worker_adapters{tier="device"} 1.0',
        'loraplex_worker_adapter_bytes{tier="disk"} 700.0',
        'loraplex_worker_adapter_bytes{tier="host"} 500.0',
        'loraplex_worker_adapter_bytes{tier="device"} 256.0',
    } <= lines
    levels = {'level="gpu"', 'level="cpu"', 'level="disk"'}
    loaded = [line for line in lines if line.startswith("vllm:lora_adapter_loaded{")]
    assert {level for level in levels for line in loaded if level in line} == levels


def test_adapter_labels_are_bounded() -> None:
    board = StatusBoard()
    many = [
        ResidencyChange(AdapterResidency(f"sha256:{i:064x}", Tier.DEVICE, 8, running_requests=1))
        for i in range(150)
    ]
    board.update(many, WorkerLoad())
    registry = CollectorRegistry()
    registry.register(metrics.AdapterCollector(board, max_loras=4096))
    text = generate_latest(registry).decode()
    shown = [line for line in text.splitlines() if line.startswith("vllm:lora_adapter_loaded{")]
    assert len(shown) == metrics.MAX_ADAPTER_LABELS + 1
    assert shown[-1].endswith(" 50.0") and 'adapter_name="other"' in shown[-1]
    assert "vllm:num_gpu_loaded_lora_adapters 150.0" in text
    assert "vllm:max_gpu_lora_adapters 4096.0" in text
    [info] = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert info.count("sha256:") == metrics.MAX_ADAPTER_LABELS

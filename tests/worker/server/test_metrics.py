"""Names and bounds of what a worker tells Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from loraplex.api.output import FinishReason
from loraplex.api.residency import AdapterResidency, Tier, WorkerLoad
from loraplex_services.worker.server import metrics
from loraplex_services.worker.server.sessions import GatewaySession, LiveRequest
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
    request = LiveRequest(GatewaySession(1, "g"), "r", (), 7, arrival_s=0.0)
    metrics.observe_tokens(request, TokenOutput("r", [1], 0), 0.5)
    metrics.observe_tokens(
        request, TokenOutput("r", [2], 1, finish_reason=FinishReason.LENGTH), 0.6
    )
    assert value_of("vllm:prompt_tokens_total") - prompts == 7
    assert value_of("vllm:generation_tokens_total") - tokens == 2
    assert value_of("vllm:time_to_first_token_seconds_count") - firsts == 1
    assert value_of("vllm:inter_token_latency_seconds_count") - gaps == 1
    assert 'vllm:request_success_total{finished_reason="length"}' in scrape()


def test_vllm_names_say_their_model_and_no_others_do() -> None:
    metrics.observe_load(StepOutput(1, [], [], [], WorkerLoad(running_requests=3)), 1)
    metrics.count_end("stop")
    lines = generate_latest(metrics.OfModel("org/base")).decode().splitlines()
    assert 'vllm:num_requests_running{model_name="org/base"} 3.0' in lines
    assert [line for line in lines if 'finished_reason="stop"' in line and "org/base" in line]
    samples = [line for line in lines if not line.startswith("#")]
    named = [line for line in samples if 'model_name="org/base"' in line]
    assert named == [line for line in samples if line.startswith("vllm:")]


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

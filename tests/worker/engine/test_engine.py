"""The engine against the real runner on a tiny random Llama."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.api.output import FinishReason
from loraplex.api.residency import Tier
from loraplex.errors import AdapterNotFound
from loraplex_services.worker.adapters.pack.image import images_in
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.types.messages import (
    AdapterFetched,
    Cancel,
    FetchFailed,
    Gone,
    Prefetch,
    Submit,
    UnloadAdapter,
    Unpin,
    WireError,
)
from tests.worker import tiny
from tests.worker.engine_stage import A, B, Stage, make_runner, mixed, submit, write_files
from tests.worker.loading import adapter_blocks


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["off", "on"], ids=["one by one", "overlapped"])
def runner(files: Path, request: pytest.FixtureRequest) -> TorchRunner:
    return make_runner(files, overlap=request.param)


@pytest.fixture
def stage(runner: TorchRunner, files: Path) -> Iterable[Stage]:
    stage = Stage(runner, files)
    yield stage
    stage.close()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_mixed_batch_gives_each_request_the_tokens_it_gets_alone(
    stage: Stage, temperature: float
) -> None:
    together = dict(stage.run(*mixed(temperature=temperature), *stage.fetched(A, B)))
    assert stage.engine.scheduler.num_running == 0
    stage.outputs.clear()
    for request in mixed(temperature=temperature):
        stage.run(request)
    assert stage.outputs == together
    assert together["b"] != together["ab"], "the second adapter changes nothing"


def test_the_adapter_changes_the_output(stage: Stage) -> None:
    requests = [submit("base", seed=5), submit("a", A, seed=5), submit("b", B, seed=5)]
    outputs = stage.run(*requests, *stage.fetched(A, B))
    assert len({tuple(tokens) for tokens in outputs.values()}) == 3


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("masks", "field", "num_tokens"),
    [
        ({"bad_token_ids": tuple(range(tiny.VOCAB))}, "bad_token_ids", 0),
        ({"allowed_token_ids": (5,), "bad_sequences": ((5, 5),)}, "allowed_token_ids", 1),
        ({"stop_token_ids": tuple(range(tiny.VOCAB)), "min_tokens": 1}, "bad_token_ids", 0),
    ],
)
def test_a_request_whose_masks_leave_no_token_fails_by_name(
    stage: Stage, masks: dict[str, object], field: str, num_tokens: int, temperature: float
) -> None:
    good = submit("good", seed=5)
    alone = list(stage.run(good)["good"])
    stage.outputs.clear()
    failures = []
    for output in stage.outputs_of(submit("stuck", temperature=temperature, **masks), good):
        failures += output.failures
    [failure] = failures
    assert (failure.request_id, failure.error.violations[0][0]) == ("stuck", field)
    assert stage.outputs == {"good": alone} | ({"stuck": [5] * num_tokens} if num_tokens else {})


def test_a_request_resumed_with_its_output_continues_with_the_same_tokens(stage: Stage) -> None:
    penalties = {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
    complete = list(stage.run(submit("r", A, seed=7, **penalties), *stage.fetched(A))["r"])
    for cut in (1, 5, 11):
        stage.outputs["r"] = complete[:cut]
        stage.run(submit("r", A, seed=7, output_ids=complete[:cut], **penalties))
        assert stage.outputs["r"] == complete, f"resumed after {cut} tokens"


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_preempted_requests_end_with_the_tokens_of_an_undisturbed_run(
    files: Path, overlap: str
) -> None:
    arena_bytes = 20 * make_runner(files).block_bytes
    runner = make_runner(files, arena_bytes=arena_bytes, max_num_batched_tokens=4, overlap=overlap)
    stage = Stage(runner, files, max_step_tokens=4)
    old = submit("old", seed=1, num_prompt=10, max_tokens=150, temperature=0.7)
    young = submit("young", seed=2, num_prompt=220, max_tokens=20, temperature=0.7)
    young_alone = Stage(runner, files, max_step_tokens=4).run(young)["young"]
    outputs = stage.run(old, young)
    assert stage.engine.scheduler.num_preemptions > 0
    assert outputs["young"] == young_alone and len(outputs["old"]) == 150


def talk(stage: Stage, requests: Sequence[Submit]) -> dict[str, list[int]]:
    """A first turn each, then a second one that begins with all of the first."""
    first = {name: list(tokens) for name, tokens in stage.run(*requests).items()}
    stage.outputs.clear()
    second = [
        replace(r, prompt_ids=[*r.prompt_ids, *first[r.request_id], 3, 1, 4])
        for r in (submit.request for submit in requests)
    ]
    stage.run(*(Submit(request=request) for request in second))
    return {f"{name}-first": tokens for name, tokens in first.items()} | stage.outputs


def test_cached_prefixes_change_no_token_and_are_counted(files: Path, runner: TorchRunner) -> None:
    requests = [
        submit(f"{digest[7:8]}{seed}", *([digest] if digest else []), seed=seed, num_prompt=60)
        for digest in ("", A, B)
        for seed in (1, 2)
    ]
    outputs = []
    for prefix_cache in (False, True):
        stage = Stage(runner, files, prefix_cache=prefix_cache)
        stage.step(*stage.fetched(A, B))
        outputs.append(talk(stage, requests))
        stage.close()
    assert outputs[0] == outputs[1]
    names = [submit.request.request_id for submit in requests]
    assert stage.cached == dict.fromkeys(names, 64), "60 + 12 - 1 known"


def test_prefixes_of_a_windowed_model_change_no_token(files: Path, tmp_path: Path) -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    tiny.write_base(tmp_path / "base", **mistral, sliding_window=24)
    runner = make_runner(tmp_path)
    outputs = []
    for prefix_cache in (False, True):
        stage = Stage(runner, files, prefix_cache=prefix_cache)
        outputs.append(talk(stage, [submit("r", seed=1, num_prompt=100)]))
    assert outputs[0] == outputs[1] and stage.cached == {"r": 96}


def test_scored_prompts_are_computed_whole(stage: Stage) -> None:
    stage.run(submit("first", num_prompt=64))
    stage.run(submit("scored", num_prompt=64, prompt_logprobs=0, max_tokens=1))
    assert stage.cached == {"first": 0, "scored": 0}
    scores = stage.last["scored"].prompt_logprobs
    assert scores is not None and len(scores) == 63


def test_windows_free_blocks_and_change_no_token(files: Path, tmp_path: Path) -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    tiny.write_base(tmp_path / "base", **mistral, sliding_window=24)
    requests = [
        submit("long", seed=1, num_prompt=150, max_tokens=40),
        submit("short", seed=2, max_tokens=40),
    ]
    outputs, most_used = [], []
    for max_step_tokens in (256, 24):
        runner = make_runner(tmp_path, max_num_batched_tokens=max_step_tokens)
        assert runner.kv_group_windows == (24,)
        stage = Stage(runner, files, max_step_tokens=max_step_tokens)
        used = [stage.blocks_used(*requests)]
        while stage.engine.has_requests:
            used.append(stage.blocks_used())
        outputs.append(stage.outputs)
        most_used.append(max(used))
    assert outputs[0] == outputs[1]
    assert most_used[1] < most_used[0], "small steps hold no more than the window and a step"


def test_cancelling_frees_the_blocks_within_the_step(stage: Stage) -> None:
    stage.step(submit("r", num_prompt=60, max_tokens=50))
    free = stage.step().load.free_blocks
    load = stage.step(Cancel("r")).load
    assert load.free_blocks > free and load.free_blocks == load.total_blocks
    assert load.idle_blocks > 0, "the prompt stays in the prefix cache"
    assert not stage.engine.has_requests


def test_requests_end_at_stop_ids_eos_and_lengths(stage: Stage) -> None:
    tokens = stage.run(submit("free", seed=4))["free"]
    assert stage.last["free"].finish_reason == FinishReason.LENGTH
    third = tokens[2]
    first_seen = tokens.index(third)
    stage.run(submit("stopped", seed=4, stop_token_ids=(third,)))
    assert stage.outputs["stopped"] == tokens[: first_seen + 1]
    assert stage.last["stopped"].finish_reason == FinishReason.STOP
    assert stage.last["stopped"].stop_token_id == third


def test_eos_ends_a_request_unless_it_is_ignored_or_too_early(stage: Stage) -> None:
    bias = ((tiny.EOS, 1e4),)
    stage.run(
        submit("eos", logit_bias=bias, ignore_eos=False),
        submit("early", logit_bias=bias, ignore_eos=False, min_tokens=3),
        submit("ignored", logit_bias=bias, ignore_eos=True),
    )
    lengths = {name: len(tokens) for name, tokens in stage.outputs.items()}
    assert lengths == {"eos": 1, "early": 4, "ignored": 12}
    assert tiny.EOS not in stage.outputs["early"][:3]


def test_a_prompt_can_be_scored_without_generating(stage: Stage) -> None:
    stage.run(submit("r", num_prompt=100, max_tokens=0, prompt_logprobs=2))
    last = stage.last["r"]
    assert last.token_ids == [] and last.finish_reason == FinishReason.LENGTH
    assert last.prompt_logprobs is not None and len(last.prompt_logprobs) == 99
    first, *others = last.prompt_logprobs.entries()
    assert first is None
    assert all(entry and entry.logprob <= 0 and len(entry.top) == 2 for entry in others)


def test_logprobs_come_with_the_tokens(stage: Stage) -> None:
    stage.run(submit("r", logprobs=3))
    [entry] = stage.last["r"].logprobs
    assert entry.token_id == stage.outputs["r"][-1]
    assert entry.top[0] == (entry.token_id, entry.logprob), "greedy takes the most likely"


def test_a_failed_fetch_fails_only_the_requests_that_wait_for_it(stage: Stage) -> None:
    stage.step(submit("a", A), submit("b", B), submit("base"))
    stage.step(FetchFailed(A, WireError.of(AdapterNotFound(A))))
    stage.run(*stage.fetched(B))
    assert stage.failures == {"a": "ADAPTER_NOT_FOUND"}
    assert set(stage.outputs) == {"b", "base"}


def test_an_adapter_on_the_device_serves_on_when_its_files_and_the_store_are_away(
    stage: Stage,
) -> None:
    stage.run(submit("before", A), *stage.fetched(A))
    stage.step(Gone(A))
    stage.run(submit("after", A), FetchFailed(A, WireError.of(AdapterNotFound(A))))
    assert stage.failures == {} and stage.outputs["after"] == stage.outputs["before"]
    output = stage.step(UnloadAdapter(A))
    assert [(c.residency.digest, c.residency.tier) for c in output.residency] == [(A, Tier.NONE)]


def test_pins_over_their_share_of_the_arena_are_refused(files: Path) -> None:
    probe = make_runner(files)
    needed = adapter_blocks(probe, files / A) + adapter_blocks(probe, files / B)
    stage = Stage(make_runner(files, arena_bytes=(2 * needed - 1) * probe.block_bytes), files)
    output = stage.step(*stage.fetched(A, B), Prefetch(A, pin=True), Prefetch(B, pin=True))
    [entry] = [c for c in output.residency if c.residency.digest == B]
    assert entry.error is not None and entry.error.reason == "PIN_LIMIT"


def test_an_adapter_that_cannot_be_copied_fails_with_a_reason_and_a_pause(
    stage: Stage, tmp_path: Path
) -> None:
    doomed = tiny.write_adapter(tmp_path / "doomed", seed=3)
    digest = "sha256:" + "c" * 64
    stage.step(AdapterFetched(digest, str(doomed), 4))
    images_in(doomed)[0].write_bytes(b"damaged")
    stage.step(submit("first", digest), submit("base"))
    stage.run(submit("second", digest))
    assert set(stage.failures) == {"first", "second"} and len(stage.outputs["base"]) == 12
    load = stage.step().load
    assert load.free_blocks == load.total_blocks


def test_a_pin_whose_adapter_cannot_be_copied_is_refused_and_keeps_no_blocks(
    stage: Stage, tmp_path: Path
) -> None:
    doomed = tiny.write_adapter(tmp_path / "doomed", seed=3)
    digest = "sha256:" + "d" * 64
    stage.step(AdapterFetched(digest, str(doomed), 4))
    images_in(doomed)[0].write_bytes(b"damaged")
    outputs = [stage.step(Prefetch(digest, pin=True)), stage.step()]
    entries = [c for o in outputs for c in o.residency if c.residency.digest == digest]
    assert any(entry.error is not None for entry in entries)
    assert not entries[-1].residency.pinned and stage.engine.cache.pinned_blocks == 0


def test_an_adapter_whose_header_is_damaged_fails_the_requests_that_wait(
    stage: Stage, tmp_path: Path
) -> None:
    broken = tiny.write_adapter(tmp_path / "broken", seed=3)
    digest = "sha256:" + "d" * 64
    (broken / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    stage.run(submit("r", digest), AdapterFetched(digest, str(broken), 4))
    assert stage.failures == {"r": "INVALID_ADAPTER"}


def test_an_adapter_over_its_share_of_the_arena_is_refused_with_the_number(files: Path) -> None:
    block_bytes = make_runner(files).block_bytes
    stage = Stage(make_runner(files, arena_bytes=4 * block_bytes), files)
    stage.run(submit("r", B, max_tokens=2), *stage.fetched(B))
    assert stage.failures == {"r": "ADAPTER_TOO_LARGE"}


def test_adapters_that_share_a_part_of_the_arena_in_turns_change_no_token(
    files: Path, stage: Stage
) -> None:
    requests = [r for r in mixed() if len(r.request.adapters.adapters) < 2]
    expected = dict(stage.run(*requests, *stage.fetched(A, B)))
    runner = make_runner(files)
    most = max(adapter_blocks(runner, files / name) for name in (A, B))
    bounded = Stage(runner, files, lora_bytes=most * runner.block_bytes)
    outputs = bounded.run(*requests, *mixed()[3:], *bounded.fetched(A, B))
    assert bounded.failures == {"ab": "REQUEST_TOO_LARGE"}
    assert outputs == expected


def test_deadlines_end_requests(stage: Stage) -> None:
    stage.run(submit("r", max_tokens=100, remaining_s=0.2))
    assert stage.failures == {"r": "DEADLINE_EXCEEDED"}
    assert 0 < len(stage.outputs["r"]) < 100


def test_a_first_token_that_is_due_too_soon_is_never_worked_for(stage: Stage) -> None:
    for seconds in (0.5, 1.0):  # what first tokens take here, as measured
        stage.engine.scheduler.times.prefills.add(9, seconds)
    stage.run(
        submit("soon", remaining_first_token_s=0.2),
        submit("begun", remaining_first_token_s=2.0, max_tokens=100),
        submit("patient"),
    )
    assert stage.failures == {"soon": "DEADLINE_INFEASIBLE"}
    assert "soon" not in stage.outputs
    assert len(stage.outputs["begun"]) == 100, "it is the first token's moment, not the request's"


def test_what_comes_while_a_step_is_under_way_has_waited_from_then(stage: Stage) -> None:
    stage.step(*stage.fetched(A), Prefetch(A, pin=True))
    came_s = stage.now
    stage.now += 0.5
    stage.run(submit("r", A, came_s=came_s), submit("late", came_s=came_s, remaining_s=0.4))
    token = stage.last["r"]
    assert round(token.timings.queue_s, 6) == 0.51
    assert token.timings.load_s == 0.0, "its adapter was here all the time"
    assert stage.failures == {"late": "DEADLINE_EXCEEDED"}


def test_wanted_adapters_load_without_a_request_and_pins_stay(stage: Stage) -> None:
    output = stage.step(*stage.fetched(A), Prefetch(A, pin=True))
    [entry] = [c.residency for c in output.residency if c.residency.digest == A]
    assert entry.tier == Tier.DEVICE and entry.pinned and entry.device_bytes > 0
    output = stage.step(Unpin(A), UnloadAdapter(A))
    [entry] = [c.residency for c in output.residency if c.residency.digest == A]
    assert entry.tier == Tier.DISK and entry.device_bytes == 0


def test_one_step_holds_every_distinct_adapter(stage: Stage) -> None:
    stage.run(*mixed(), *stage.fetched(A, B))
    assert stage.step().load.max_distinct_adapters == 2

"""The experts that requests are told == those that the routers of transformers + peft choose."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from loraplex.api.output import RoutedExperts, joined_experts
from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.runner.step_programs import StepPrograms
from loraplex_services.worker.scheduling import drafts as drafting
from loraplex_services.worker.types.messages import Command, Submit
from tests.worker.commands import make_submit
from tests.worker.engine_stage import A, B, Stage, make_runner
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import TinyBase, make_base
from tests.worker.parity.reference import Reference
from tests.worker.parity.router_choices import chosen_by

LONG = ("qwen2-moe", "qwen3-next", "gemma4-all")
BASES = ["mixtral", "qwen3-moe", "qwen3.5-moe", "gpt-oss", "gemma4-moe"]
FEATURES = {A: "experts-down", B: "experts"}
"""The first is on routers, too."""


@pytest.fixture(
    scope="module", params=[*BASES, *(pytest.param(n, marks=pytest.mark.long) for n in LONG)]
)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    return write_files(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    """Without a window, so that all blocks of a request stay."""
    return write_files("mixtral", tmp_path_factory.mktemp("mixtral"), sliding_window=None)


def write_files(name: str, root: Path, **fields: object) -> TinyBase:
    base = make_base(name, root / "base", **fields)
    for digest, feature in FEATURES.items():
        make_adapter(base, feature, root / digest)
    return base


def stage_of(base: TinyBase, arena_bytes: int = 1 << 22, overlap: str = "off", **fields) -> Stage:
    files = base.folder.parent
    runner = make_runner(files, arena_bytes, overlap=overlap)
    return Stage(runner, files, **{"max_step_tokens": 24, **fields})


def asking(
    name: str,
    *digests: str,
    num_prompt: int = 40,
    routed_from: int | None = 0,
    output_ids: Sequence[int] = (),
    **sampling: object,
) -> Submit:
    """Prompts of one length are the same."""
    rng = random.Random(num_prompt)
    prompt = [rng.randrange(300) for _ in range(num_prompt)]
    params = SamplingParams(**{"max_tokens": 6, "seed": 1, "ignore_eos": True, **sampling})
    own = {"output_ids": list(output_ids), "routed_from": routed_from}
    return make_submit(name, prompt, params, digests, **own)


def told(stage: Stage, *commands: Command) -> dict[str, RoutedExperts | None]:
    """What each request is told until all have ended."""
    parts: dict[str, list[RoutedExperts | None]] = {}
    for output in stage.outputs_of(*stage.fetched(A, B), *commands):
        for token in output.tokens:
            parts.setdefault(token.request_id, []).append(token.routed_experts)
    assert not stage.failures
    return {name: joined(own) for name, own in parts.items()}


def joined(parts: Iterable[RoutedExperts | None]) -> RoutedExperts | None:
    found = [part for part in parts if part is not None]
    for before, after in itertools.pairwise(found):
        assert before.end == after.start, "a position twice or not at all"
    return joined_experts(found)


def numbers(experts: RoutedExperts | None) -> np.ndarray:
    assert experts is not None
    return np.frombuffer(experts.experts, experts.dtype).reshape(experts.shape)


def tokens_of(stage: Stage, submit: Submit) -> list[int]:
    """All tokens that were computed: the last one was not."""
    request = submit.request
    return [*request.prompt_ids, *request.output_ids, *stage.outputs[request.request_id]][:-1]


def test_experts_are_those_of_transformers_and_peft(base: TinyBase) -> None:
    """In one batch, with prompts in chunks, adapters on routers and experts, and others beside."""
    reference = Reference(base, {digest: base.folder.parent / digest for digest in FEATURES})
    requests = {
        None: asking("base", num_prompt=50),
        A: asking("a", A, num_prompt=33),
        B: asking("b", B, num_prompt=70),
    }
    stage = stage_of(base)
    experts = told(stage, *requests.values(), asking("silent", routed_from=None))
    assert experts["silent"] is None
    for adapter, submit in requests.items():
        name, tokens = submit.request.request_id, tokens_of(stage, submit)
        expected = chosen_by(reference.model(adapter), tokens, base.config.num_hidden_layers)
        assert experts[name].start == 0
        assert numbers(experts[name]).tolist() == expected.tolist(), name
    assert len({numbers(experts[n])[0].tobytes() for n in ("base", "a", "b")}) > 1


def test_steps_that_overlap_say_the_same(mixtral: TinyBase) -> None:
    requests = [asking("base"), asking("a", A, num_prompt=51), asking("b", B, max_tokens=1)]
    plain, overlapping = (
        told(stage_of(mixtral, overlap=overlap), *requests) for overlap in ("off", "on")
    )
    assert plain == overlapping


def test_a_cached_prefix_is_used_up_to_the_first_position_that_is_asked_for(
    mixtral: TinyBase,
) -> None:
    stage = stage_of(mixtral)
    complete = told(stage, asking("first", num_prompt=60))["first"]
    for first, num_cached in ((0, 0), (15, 0), (40, 32), (59, 48), (60, 48)):
        name = f"from {first}"
        experts = told(stage, asking(name, num_prompt=60, routed_from=first))[name]
        assert experts == complete.between(first, complete.end)
        assert stage.cached[name] == num_cached
    told(stage, asking("unasked", num_prompt=60, routed_from=None))
    assert stage.cached["unasked"] == 48


def test_drafts_that_are_rejected_leave_no_experts(
    mixtral: TinyBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "FIXED_ROWS", 1000)
    monkeypatch.setattr(drafting.Drafts, "_time", lambda _, num_rows: 1000.0 + num_rows)
    few = {"allowed_token_ids": (1, 2, 3), "max_tokens": 50, "temperature": 0.7}
    ends = {**few, "ignore_eos": False, "stop_token_ids": (3,), "min_tokens": 20}
    requests = [asking("a", A, **few), asking("b", **few), asking("c", B, **ends)]
    said, counts = [], [0, 0]
    for drafts in (False, True):
        stage = stage_of(mixtral, drafts=drafts)
        parts: dict[str, list[RoutedExperts | None]] = {}
        for output in stage.outputs_of(*stage.fetched(A, B), *requests):
            counts[0] += output.drafted
            counts[1] += output.accepted
            for token in output.tokens:
                parts.setdefault(token.request_id, []).append(token.routed_experts)
        said.append({name: joined(own) for name, own in parts.items()})
        for submit in requests:
            own = said[-1][submit.request.request_id]
            assert own.end == len(tokens_of(stage, submit))
    assert said[0] == said[1]
    assert 0 < counts[1] < counts[0]


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_preempted_request_is_told_each_position_once(mixtral: TinyBase, overlap: str) -> None:
    requests = [
        asking("old", num_prompt=10, max_tokens=150),
        asking("young", num_prompt=220, max_tokens=20),
    ]
    num_bytes = 20 * make_runner(mixtral.folder.parent).block_bytes
    small = {"max_step_tokens": 4, "overlap": overlap}
    tight = stage_of(mixtral, num_bytes, **small)
    experts = told(tight, *requests)
    assert tight.engine.scheduler.num_preemptions > 0
    assert experts == told(stage_of(mixtral, **small), *requests)
    assert len(experts["young"]) == 239


def test_a_request_that_continues_with_other_adapters_is_told_theirs(mixtral: TinyBase) -> None:
    """As after a tag has moved: the experts of a position are those of the adapters that chose the
    token after it."""
    stage = stage_of(mixtral)
    before = asking("before", A, num_prompt=30, max_tokens=4)
    told(stage, before)
    emitted = stage.outputs["before"]
    first = 30 + len(emitted) - 1
    after = asking("after", B, num_prompt=30, output_ids=emitted, routed_from=first, max_tokens=9)
    stage.outputs["after"] = list(emitted)
    experts = told(stage, after)["after"]
    reference = Reference(mixtral, {B: mixtral.folder.parent / B})
    tokens = [*after.request.prompt_ids, *stage.outputs["after"]][:-1]
    expected = chosen_by(reference.model(B), tokens, mixtral.config.num_hidden_layers)
    assert experts.start == first and len(experts) == 9 - len(emitted)
    assert numbers(experts).tolist() == expected[first:].tolist()


def test_nothing_is_noted_when_nobody_asks(mixtral: TinyBase) -> None:
    stage = stage_of(mixtral)
    plan_rows: list[bool] = []
    launch = stage.runner.launch

    def spying(plan):
        plan_rows.append(plan.notes_experts)
        return launch(plan)

    stage.runner.launch = spying
    told(stage, asking("silent", routed_from=None))
    assert plan_rows and not any(plan_rows)


def test_steps_that_run_as_programs_say_the_same(mixtral: TinyBase) -> None:
    """Of one shape, the first step is recorded and the others run, whether they ask or not."""
    requests = [asking("base"), asking("a", A), asking("b", B, max_tokens=9)]
    silent = [asking(f"silent {i}", A, routed_from=None) for i in range(3)]
    plain, recorded = stage_of(mixtral), stage_of(mixtral)
    if (programs := getattr(plain.runner._model.pass_layers, "__self__", None)) is None or (
        not isinstance(programs, StepPrograms)
    ):
        pytest.skip("no compiled kernels")
    plain.runner._model.pass_layers = plain.runner._model.forward_layers
    expected = told(plain, *requests)
    told(recorded, *silent)
    assert told(recorded, *requests) == expected

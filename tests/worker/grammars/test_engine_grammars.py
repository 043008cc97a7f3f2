"""Constrained requests through the real engine on the demo base, whose tokens are bytes."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.api.output import FinishReason
from loraplex.api.sampling import Grammar, SamplingParams
from loraplex_services.worker.engine.engine import Engine
from loraplex_services.worker.grammars import constraint
from loraplex_services.worker.runner.building import build_runner
from loraplex_services.worker.runner.runner import TorchRunner
from loraplex_services.worker.types.messages import Cancel, Command, Submit
from loraplex_services.worker.types.step_plan import StepPlan
from tests.worker.commands import make_config, make_submit

BASE = Path(__file__).parents[3] / "demo" / "base"
BOS, EOS = 256, 257
PROMPT = [BOS, *b"hello="]
OBJECT = Grammar(
    json_schema={
        "type": "object",
        "properties": {
            "a": {"type": "string", "maxLength": 5},
            "b": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)


@dataclass
class Stage:
    """An engine and everything it said."""

    engine: Engine
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    failures: dict[str, tuple[str, str]] = field(default_factory=dict)

    def step(self, *commands: Command) -> None:
        output = self.engine.step(commands)
        self.engine.check_integrity()
        for token in output.tokens:
            self.outputs.setdefault(token.request_id, []).extend(token.token_ids)
            self.finished[token.request_id] = token.finish_reason
        for failure in output.failures:
            [(name, _, description)] = failure.error.violations
            self.failures[failure.request_id] = (name, description)

    def run(self, *commands: Command) -> dict[str, list[int]]:
        """The outputs, once every request has ended."""
        self.outputs, self.finished, self.failures = {}, {}, {}
        deadline = time.monotonic() + 60
        self.step(*commands)
        while self.engine.has_requests:
            assert time.monotonic() < deadline, "the engine does not finish"
            if self.engine.awaits_grammars:
                time.sleep(0.001)
            self.step()
        return self.outputs


@pytest.fixture(scope="module")
def runner() -> Iterator[TorchRunner]:
    before = torch.get_num_threads()
    runner = build_runner(BASE, device="cpu", dtype="float32", arena_bytes=4 << 20)
    torch.set_num_threads(1)
    yield runner
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def stage(runner: TorchRunner) -> Stage:
    config = make_config(model_dir=str(BASE))
    return Stage(Engine(runner, config, time.monotonic))


def submit(
    request_id: str,
    grammar: Grammar | None = None,
    output_ids: Sequence[int] = (),
    tenant: str = "default",
    **sampling: Any,
) -> Submit:
    fields: dict[str, Any] = {"max_tokens": 160, "seed": 1, "temperature": 1.2, **sampling}
    return make_submit(
        request_id,
        PROMPT,
        SamplingParams(**fields),
        output_ids=list(output_ids),
        grammar=grammar,
        tenant=tenant,
    )


def text_of(token_ids: Sequence[int]) -> str:
    """The output without its EOS."""
    return bytes(token for token in token_ids if token != EOS).decode()


REGEXES = st.recursive(
    st.sampled_from(["a", "b", "[0-9]", "[^a-y]", "\\.", "é", "(xy|z)"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["?", "{1,3}", "{2}"])).map(lambda p: f"({p[0]}){p[1]}"),
    ),
    max_leaves=5,
)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(pattern=REGEXES, seed=st.integers(0, 1 << 32))
def test_every_output_matches_its_regex(stage: Stage, pattern: str, seed: int) -> None:
    ids = stage.run(submit("r", Grammar(regex=pattern), seed=seed))["r"]
    assert stage.finished["r"] == FinishReason.STOP
    assert re.fullmatch(pattern, text_of(ids), re.DOTALL), pattern


LEAVES: st.SearchStrategy[Any] = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -5, "maximum": 120},
        {"type": "string", "maxLength": 4},
        {"enum": ["red", 2, None]},
        {"const": "x y"},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties),
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=4,
)


def holds(schema: Any, value: Any) -> bool:
    """Just the part of JSON Schema that `SCHEMAS` draws from, by itself."""
    if "anyOf" in schema:
        return any(holds(part, value) for part in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    match schema["type"]:
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "array":
            is_short = isinstance(value, list) and len(value) <= 2
            return is_short and all(holds(schema["items"], item) for item in value)
    properties = schema["properties"]
    has_all = isinstance(value, dict) and set(value) == set(properties)
    return has_all and all(holds(properties[key], value[key]) for key in value)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 32))
def test_every_output_is_json_of_its_schema(stage: Stage, schema: Any, seed: int) -> None:
    grammar = Grammar(json_schema=json.dumps(schema))
    ids = stage.run(submit("r", grammar, seed=seed, max_tokens=400))["r"]
    assert stage.finished["r"] == FinishReason.STOP
    assert holds(schema, json.loads(text_of(ids)))


def test_a_resumed_request_continues_with_the_same_tokens(stage: Stage) -> None:
    complete = list(stage.run(submit("r", OBJECT, repetition_penalty=1.1))["r"])
    json.loads(text_of(complete))
    for cut in (1, 7, len(complete) // 2, len(complete) - 1):
        request = submit("r", OBJECT, output_ids=complete[:cut], repetition_penalty=1.1)
        assert complete[:cut] + stage.run(request)["r"] == complete


def test_output_that_the_grammar_forbids_cannot_be_resumed(stage: Stage) -> None:
    stage.run(submit("r", OBJECT, output_ids=list(b"no")))
    assert stage.failures["r"][0] == "output_ids"


def test_a_thought_ends_at_its_budget_also_after_a_failover(stage: Stage) -> None:
    """As the gateway writes the grammar of a thought that the prompt opened."""
    closing, budget = 258, 9
    budgeted = Grammar(
        ebnf=f"start: part{{0,{budget}}} <[{closing}]> rest\n"
        f"part: <[^{EOS},{closing}]>\n"
        "rest: (<[*]>)*\n"
    )
    requests = [submit(f"r{seed}", budgeted, seed=seed, max_tokens=24) for seed in range(8)]
    outputs = stage.run(*requests)
    assert not stage.failures
    assert all(closing in ids[: budget + 1] for ids in outputs.values())
    for seed in range(8):
        whole = outputs[f"r{seed}"]
        half = whole[: budget // 2]
        rest = stage.run(submit("late", budgeted, half, seed=seed, max_tokens=24))["late"]
        assert half + rest == whole


def test_a_mixed_batch_gives_each_request_the_tokens_it_gets_alone(stage: Stage) -> None:
    digits = Grammar(regex="[0-9]{12}")
    requests = [
        submit("free", max_tokens=24, seed=4),
        submit("object", OBJECT, seed=5),
        submit("digits", digits, seed=6, temperature=0.0),
        submit("late", max_tokens=24, seed=7, temperature=0.0),
    ]
    together = dict(stage.run(*requests))
    assert set(together) == {"free", "object", "digits", "late"}
    for request in requests:
        name = request.request.request_id
        assert stage.run(request) == {name: together[name]}


@pytest.mark.parametrize("quick_s", [60.0, 0.0], ids=["planned ahead", "left out meanwhile"])
def test_steps_that_overlap_give_the_same_tokens_under_grammars(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, quick_s: float
) -> None:
    monkeypatch.setattr(constraint, "QUICK_MASK_S", quick_s)
    requests = [
        submit("free", max_tokens=24, seed=4, frequency_penalty=0.5),
        submit("object", OBJECT, seed=5, repetition_penalty=1.1),
        submit("digits", Grammar(regex="[0-9]{12}"), seed=6, temperature=0.0),
    ]
    expected = dict(stage.run(*requests))
    runner = build_runner(BASE, device="cpu", dtype="float32", arena_bytes=4 << 20, overlap="on")
    overlapped = Stage(Engine(runner, make_config(model_dir=str(BASE)), time.monotonic))
    plans: list[StepPlan] = []
    launch = runner.launch
    monkeypatch.setattr(runner, "launch", lambda plan: (plans.append(plan), launch(plan))[1])
    assert overlapped.run(*requests) == expected
    assert any(plan.awaits_masks for plan in plans) == (quick_s > 0)


def test_eos_ends_the_output_only_where_the_grammar_accepts(stage: Stage) -> None:
    grammar = Grammar(regex="(ab){2,4}")
    biased = {"logit_bias": ((EOS, 100.0),), "temperature": 0.0}
    ids = stage.run(submit("r", grammar, **biased))["r"]
    assert ids == [*b"abab", EOS]
    longer = stage.run(submit("r", grammar, min_tokens=6, **biased))["r"]
    assert longer == [*b"ababab", EOS]


def test_a_finished_grammar_ends_the_request_without_eos(stage: Stage) -> None:
    ids = stage.run(submit("r", Grammar(choice=("yes", "no")), ignore_eos=True))["r"]
    assert text_of(ids) in ("yes", "no") and EOS not in ids
    assert stage.finished["r"] == FinishReason.STOP


def test_a_request_that_no_token_may_continue_fails_by_name(stage: Stage) -> None:
    grammar = Grammar(regex="ab")
    stage.run(submit("stuck", grammar, bad_token_ids=(ord("b"),)), submit("fine", max_tokens=4))
    assert stage.failures["stuck"][0] == "grammar"
    assert len(stage.outputs["fine"]) == 4 and "fine" not in stage.failures


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(regex="("), "unclosed group"),
        (Grammar(ebnf="start: missing"), "unknown name"),
        (Grammar(json_schema='{"type": "colour"}'), "Invalid type"),
        (Grammar(json_schema="[]"), "a JSON Schema is an object"),
        (Grammar(regex="(((a{100}){100}){100}){100}"), "cannot be followed"),
    ],
)
def test_a_bad_grammar_is_refused_while_neighbours_go_on(
    stage: Stage, grammar: Grammar, reason: str
) -> None:
    stage.run(submit("bad", grammar), submit("fine", max_tokens=4, ignore_eos=True))
    name, description = stage.failures["bad"]
    assert name == "grammar" and reason in description
    assert len(stage.outputs["fine"]) == 4


def test_a_request_cancelled_while_its_grammar_compiles_is_gone(stage: Stage) -> None:
    slow = Grammar(json_schema=json.dumps({"enum": [f"{'x' * 40}{i}" for i in range(2000)]}))
    assert stage.run(submit("r", slow), Cancel("r")) == {}
    assert not stage.failures and not stage.engine.awaits_grammars


@pytest.mark.hostile
def test_a_grammar_that_is_hard_to_compile_does_not_hold_up_another_tenant(stage: Stage) -> None:
    ids = [f"hard-{n}" for n in range(4)]
    grammars = [
        Grammar(json_schema={"type": "integer", "multipleOf": 90_001 + n}) for n in range(4)
    ]
    hard = [submit(i, g, tenant="globex") for i, g in zip(ids, grammars, strict=True)]
    stage.outputs, stage.finished, stage.failures = {}, {}, {}
    stage.step(*hard, submit("easy", Grammar(regex="[a-z]{3}"), tenant="acme"))
    while "easy" not in stage.finished:
        stage.step()
    assert not stage.outputs.keys() & set(ids[1:])
    stage.step(*map(Cancel, ids))


def test_an_end_of_sequence_beyond_the_vocabulary_does_not_keep_output_from_ending(
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(BASE, tmp_path / "base"))
    found = json.loads((folder / "generation_config.json").read_text())
    found["eos_token_id"] = [EOS, 100_000]
    (folder / "generation_config.json").write_text(json.dumps(found))
    runner = build_runner(folder, device="cpu", dtype="float32", arena_bytes=4 << 20)
    stage = Stage(Engine(runner, make_config(model_dir=str(folder)), time.monotonic))
    outputs = stage.run(submit("r", Grammar(regex="[a-c]{2}"), min_tokens=1))
    assert not stage.failures
    assert re.fullmatch("[a-c]{2}", text_of(outputs["r"]))

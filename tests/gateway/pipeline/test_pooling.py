"""Vectors and scores: which call an adapter answers, which token counts, what logits mean."""

from __future__ import annotations

import math
from typing import Any

import pytest

from loraplex.adapter_format.pooling_fields import MULTI_LABEL, REGRESSION, PoolingFields
from loraplex.api.pooling import Pooling
from loraplex.api.request import ChatPrompt, RequestedAdapter, TextPrompt
from loraplex.errors import InvalidRequest, Unsupported
from loraplex_services.gateway.http.calls import Origin
from loraplex_services.gateway.http.classify import classes_body, parse_classify
from loraplex_services.gateway.pipeline.embedding import NO_OUTPUT, Finish, Pooled, finished
from loraplex_services.gateway.pipeline.pooling import (
    choose_pooling,
    labels_of,
    normalizes,
    scored_ids,
)
from loraplex_services.gateway.pipeline.scoring import score_of
from loraplex_services.gateway.request import GenerateCall, RunningAdapter, ServedModel

BASE = ServedModel("base", vocab_size=100, max_model_len=64, pad_token_id=9)
ORIGIN = Origin("r", "default", "", "")


def adapter(task: str = "CAUSAL_LM", **fields: object) -> RunningAdapter:
    return RunningAdapter("default/a:v1", "sha256:0", task=task, pooling=PoolingFields(**fields))


JUDGE = adapter("SEQ_CLS", num_labels=3)


def chosen(pooling: Pooling, *adapters: RunningAdapter, listed: bool = False) -> Pooling:
    asked = tuple(RequestedAdapter(a.label) for a in adapters) if listed else ()
    call = GenerateCall(
        tenant="default",
        model="a",
        prompt=TextPrompt("x"),
        sampling=NO_OUTPUT,
        adapters=asked,
        pooling=pooling,
    )
    return choose_pooling(call, adapters)


def test_vectors_are_pooled_as_asked_else_as_the_adapter_says_else_by_the_last_token() -> None:
    assert chosen(Pooling.DEFAULT) is Pooling.LAST
    assert chosen(Pooling.DEFAULT, adapter(pooling="mean")) is Pooling.MEAN
    assert chosen(Pooling.LAST, adapter(pooling="mean")) is Pooling.LAST
    mixed = adapter(pooling="mean"), adapter(), adapter(pooling="last")
    assert chosen(Pooling.DEFAULT, *mixed[:2]) is Pooling.MEAN
    assert chosen(Pooling.DEFAULT, *mixed) is Pooling.LAST


@pytest.mark.parametrize(
    ("pooling", "found", "field"),
    [
        (Pooling.NONE, JUDGE, "model"),
        (Pooling.NONE, adapter("FEATURE_EXTRACTION"), "model"),
        (Pooling.HEAD, adapter(), "model"),
        (Pooling.HEAD, adapter("FEATURE_EXTRACTION"), "model"),
        (Pooling.HEAD, None, "model"),
    ],
)
def test_a_call_that_the_adapter_was_not_trained_for_is_refused(
    pooling: Pooling, found: RunningAdapter | None, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chosen(pooling, *([found] if found else []))
    assert [violation.field for violation in caught.value.violations] == [field]


def test_an_adapter_of_several_that_does_not_generate_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        chosen(Pooling.NONE, adapter(), JUDGE, listed=True)
    assert caught.value.violations[0].field == "adapters"


def test_the_last_token_that_is_no_padding_is_scored() -> None:
    own = adapter("SEQ_CLS", num_labels=1, pad_token_id=7)
    assert scored_ids((9, 4, 9, 5, 9, 9), (JUDGE,), BASE) == (9, 4, 9, 5)
    assert scored_ids((4, 9, 7, 7), (own,), BASE) == (4, 9)
    assert scored_ids((9, 9, 9), (JUDGE,), BASE) == (9,)
    assert scored_ids((4, 9), (JUDGE,), ServedModel("b", 100, 64)) == (4, 9)


def test_logits_mean_what_transformers_makes_of_them() -> None:
    single = score_of(JUDGE, (1.0, 3.0, -500.0))
    assert single.label == "LABEL_1"
    assert single.probabilities == pytest.approx((1 / (1 + math.e**2), 1 / (1 + math.e**-2), 0))
    multi = score_of(adapter("SEQ_CLS", num_labels=2, problem_type=MULTI_LABEL), (0.0, -900.0))
    assert multi.probabilities == pytest.approx((0.5, 0.0))
    reward = score_of(adapter("SEQ_CLS", num_labels=1), (-2.0,))
    assert reward.probabilities == pytest.approx((1 / (1 + math.exp(2)),))
    number = score_of(adapter("SEQ_CLS", num_labels=1, problem_type=REGRESSION), (-2.0,))
    assert (number.logits, number.probabilities, number.label) == ((-2.0,), (), "")


def test_labels_are_the_adapters_own_where_it_names_them() -> None:
    assert labels_of(JUDGE) == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert labels_of(adapter("SEQ_CLS", num_labels=2, labels=("no", "yes"))) == ("no", "yes")


def test_vectors_are_cut_and_scaled_as_asked() -> None:
    vector = (3.0, 4.0, 12.0)
    assert finished(vector, Finish(), is_unit=True) == pytest.approx((3 / 13, 4 / 13, 12 / 13))
    assert finished(vector, Finish(), is_unit=False) == vector
    assert finished(vector, Finish(dimensions=2), is_unit=True) == pytest.approx((0.6, 0.8))
    assert finished(vector, Finish(normalize=False, dimensions=1), is_unit=True) == (3.0,)
    assert not normalizes([adapter(normalize=False)]) and normalizes([adapter()])
    with pytest.raises(InvalidRequest, match="dimensions"):
        finished(vector, Finish(dimensions=4), is_unit=True)


def test_classify_takes_inputs_or_one_conversation() -> None:
    call = parse_classify({"model": "a", "input": ["x", [1, 2]]}, ORIGIN)
    assert [each.pooling for each in call.calls] == [Pooling.HEAD] * 2 and call.use_activation
    turns = [{"role": "user", "content": "x"}]
    [chat] = parse_classify({"model": "a", "messages": turns}, ORIGIN).calls
    assert isinstance(chat.prompt, ChatPrompt) and not chat.prompt.add_generation_prompt


@pytest.mark.parametrize(
    ("fields", "bad"),
    [
        ({"input": "x"}, "model"),
        ({"model": "a"}, "input"),
        ({"model": "a", "input": "x", "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"model": "a", "input": "x", "use_activation": "no"}, "use_activation"),
        ({"model": "a", "input": "x", "colour": "red"}, "colour"),
    ],
)
def test_a_bad_field_of_classify_is_named(fields: dict[str, Any], bad: str) -> None:
    with pytest.raises((InvalidRequest, Unsupported)) as caught:
        parse_classify(fields, ORIGIN)
    assert caught.value.violations[0].field == bad


def test_classify_prints_probabilities_or_logits_as_asked() -> None:
    scores = [score_of(JUDGE, (1.0, 3.0, 2.0))]
    for asked, want in ((True, scores[0].probabilities), (False, scores[0].logits)):
        fields = {"model": "a", "input": "x", "use_activation": asked}
        body = classes_body(parse_classify(fields, ORIGIN), "r", Pooled([], [], ""), scores)
        [entry] = body["data"]
        assert entry == {
            "index": 0,
            "label": "LABEL_1",
            "probs": want,
            "logits": (1.0, 3.0, 2.0),
            "num_classes": 3,
        }

"""Requests that must be refused, by field; token ids stay out of the text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loraplex.adapter_format.vocabulary import MAX_ADDED_TOKENS
from loraplex.api.pooling import Pooling
from loraplex.api.request import AdapterSet, WorkerRequest
from loraplex.api.sampling import SamplingParams
from loraplex.errors import InvalidRequest
from loraplex_services.common.limits import MAX_REQUEST_ID_CHARS
from loraplex_services.worker.server.validation import IntakeLimits, check_request
from tests.worker.commands import make_submit

LIMITS = IntakeLimits(vocab_size=50, max_model_len=20, max_adapters=2)
DIGESTS = ["sha256:" + letter * 64 for letter in "abc"]
GOOD = make_submit("r", [1, 2, 49], SamplingParams(max_tokens=17, seed=0)).request


def with_sampling(**fields: object) -> WorkerRequest:
    return replace(GOOD, sampling=replace(GOOD.sampling, **fields))


def with_fields(**fields: object) -> WorkerRequest:
    return replace(GOOD, **fields)


def test_a_request_that_just_fits_is_accepted() -> None:
    check_request(GOOD, LIMITS)
    check_request(with_sampling(max_tokens=0, prompt_logprobs=1), LIMITS)
    check_request(with_fields(adapters=AdapterSet(((DIGESTS[0], 1.0),))), LIMITS)
    longest = "i" * MAX_REQUEST_ID_CHARS
    check_request(with_fields(request_id=f"{longest}.127.{1 << 32}"), LIMITS)


def test_experts_can_be_asked_for_from_any_position_of_a_mixture() -> None:
    limits = replace(LIMITS, routes=True)
    continued = with_fields(output_ids=[1, 2])
    for first in (0, 3, 5):
        check_request(replace(continued, routed_from=first), limits)
    with pytest.raises(InvalidRequest, match="a position from 0 to 5"):
        check_request(replace(continued, routed_from=6), limits)


def test_tokens_that_only_an_adapter_can_have_are_left_to_it() -> None:
    own = AdapterSet(((DIGESTS[0], 1.0),))
    check_request(with_fields(adapters=own, prompt_ids=[50]), LIMITS)
    with pytest.raises(InvalidRequest, match="of the base are 0 to 49, and adapters add at most"):
        check_request(with_fields(adapters=own, prompt_ids=[50 + MAX_ADDED_TOKENS]), LIMITS)


BAD = [
    (with_fields(routed_from=0), "routed_from"),
    (with_fields(request_id=""), "request_id"),
    (with_fields(prompt_ids=[]), "prompt_ids"),
    (with_fields(prompt_ids=[1, 50]), "prompt_ids[1]"),
    (with_fields(output_ids=[49, -1]), "output_ids[1]"),
    (with_fields(output_ids=[1] * 17), "output_ids"),
    (with_sampling(max_tokens=18), "sampling.max_tokens"),
    (with_sampling(min_tokens=18), "sampling.min_tokens"),
    (with_sampling(temperature=-0.1), "sampling.temperature"),
    (with_sampling(temperature=float("inf")), "sampling.temperature"),
    (with_sampling(top_p=0.0), "sampling.top_p"),
    (with_sampling(min_p=1.1), "sampling.min_p"),
    (with_sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
    (with_sampling(presence_penalty=float("nan")), "sampling.presence_penalty"),
    (with_sampling(logprobs=257), "sampling.logprobs"),
    (with_sampling(prompt_logprobs=257), "sampling.prompt_logprobs"),
    (with_sampling(stop_token_ids=(50,)), "sampling.stop_token_ids[0]"),
    (with_fields(pooling=Pooling.LAST), "pooling"),
    (
        with_fields(pooling=Pooling.HEAD, sampling=SamplingParams(max_tokens=0, seed=0)),
        "pooling",
    ),
    (with_sampling(allowed_token_ids=(1, 99)), "sampling.allowed_token_ids[1]"),
    (with_sampling(bad_token_ids=(50,)), "sampling.bad_token_ids[0]"),
    (with_sampling(bad_sequences=((1, 2), (1, 50))), "sampling.bad_sequences[1][1]"),
    (with_sampling(bad_sequences=((1,),)), "sampling.bad_sequences[0]"),
    (with_sampling(bad_sequences=((1,) * 514,)), "sampling.bad_sequences[0]"),
    (with_sampling(bad_sequences=((1, 2),) * 1025), "sampling.bad_sequences"),
    (with_sampling(logprob_token_ids=(50,)), "sampling.logprob_token_ids[0]"),
    (with_sampling(logprob_token_ids=(1,) * 257), "sampling.logprob_token_ids"),
    (with_sampling(logit_bias=((50, 1.0),)), "sampling.logit_bias[0]"),
    (with_sampling(logit_bias=((5, float("nan")),)), "sampling.logit_bias"),
    (with_fields(adapters=AdapterSet((("sha256:x", 1.0),))), "adapters.digest"),
    (with_fields(adapters=AdapterSet(((DIGESTS[0], float("inf")),))), "adapters.weight"),
    (with_fields(adapters=AdapterSet(((DIGESTS[0], 1.0), (DIGESTS[0], 2.0)))), "adapters"),
    (with_fields(adapters=AdapterSet(tuple((d, 1.0) for d in DIGESTS))), "adapters"),
    (with_fields(fairness_weight=0.0), "fairness_weight"),
]


@pytest.mark.parametrize(("request_", "field"), BAD, ids=[field for _, field in BAD])
def test_a_bad_field_is_named(request_: WorkerRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(request_, LIMITS)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_no_token_id_shows_in_an_error() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request(with_fields(prompt_ids=[1, 987654]), LIMITS)
    [violation] = caught.value.violations
    assert "987654" not in f"{caught.value.message} {violation.value} {violation.description}"

"""What is checked once a request's adapters are known, and from where on they act."""

from dataclasses import replace

import pytest

from loraplex.api.pooling import Pooling
from loraplex.api.request import AdapterSet
from loraplex.api.sampling import SamplingParams
from loraplex.errors import InvalidRequest
from loraplex_services.worker.engine.adapter_checks import NEVER, BaseFacts, admit, last_occurrence
from loraplex_services.worker.types.adapter_facts import AdapterFacts
from loraplex_services.worker.types.request import OwnRope, Request

FIRST, SECOND = (f"sha256:{digit * 64}" for digit in "ab")
VOCAB = 100
BASE = BaseFacts(VOCAB, 64)


def request_of(*adapters, prompt=(1, 2, 3), **sampling):
    params = SamplingParams(max_tokens=4, seed=1, **sampling)
    return Request("r", list(prompt), params, AdapterSet(tuple(adapters)))


@pytest.mark.parametrize("position", [0, 1])
def test_what_adds_to_no_other_adapter_is_refused_by_its_digest(position):
    facts = [AdapterFacts(), AdapterFacts()]
    facts[position] = AdapterFacts(alone_because="trains biases")
    with pytest.raises(InvalidRequest) as caught:
        admit(request_of((FIRST, 1.0), (SECOND, 0.5)), facts, BASE)
    (violation,) = caught.value.violations
    assert violation.field == "adapters"
    assert violation.value == (FIRST, SECOND)[position]
    assert "trains biases" in violation.description


def test_plain_adapters_combine_and_special_ones_run_alone():
    admit(request_of((FIRST, 1.0), (SECOND, 0.5)), [AdapterFacts()] * 2, BASE)
    admit(request_of((FIRST, 1.0)), [AdapterFacts(alone_because="uses DoRA")], BASE)


def test_a_capped_context_holds_for_adapters_with_a_longer_one_too():
    facts = [AdapterFacts(context_tokens=200)]
    long = request_of((FIRST, 1.0), prompt=[1] * 61)
    admit(long, facts, BASE)
    with pytest.raises(InvalidRequest, match="exceed the context of 64 tokens"):
        admit(long, facts, replace(BASE, caps_context=True))


def test_dora_has_no_other_weight_than_one():
    with pytest.raises(InvalidRequest, match="weight"):
        admit(request_of((FIRST, 0.5)), [AdapterFacts(has_gain=True)], BASE)


@pytest.mark.parametrize(
    "field", ["allowed_token_ids", "bad_token_ids", "stop_token_ids", "logprob_token_ids"]
)
def test_token_ids_are_those_of_the_adapter(field):
    resized = [AdapterFacts(vocab_size=VOCAB + 2)]
    admit(request_of((FIRST, 1.0), prompt=[VOCAB + 1], **{field: (VOCAB,)}), resized, BASE)
    with pytest.raises(InvalidRequest, match=field):
        admit(request_of((FIRST, 1.0), **{field: (1, VOCAB)}), [AdapterFacts()], BASE)


def test_tokens_of_bad_sequences_are_those_of_the_adapter():
    asked = {"bad_sequences": ((1, 2), (VOCAB, 1))}
    admit(request_of((FIRST, 1.0), **asked), [AdapterFacts(vocab_size=VOCAB + 2)], BASE)
    with pytest.raises(InvalidRequest, match=r"bad_sequences\[1\]"):
        admit(request_of((FIRST, 1.0), **asked), [AdapterFacts()], BASE)


def test_tokens_that_an_adapter_cut_off_are_refused():
    with pytest.raises(InvalidRequest, match=r"prompt_ids\[1\]"):
        admit(request_of((FIRST, 1.0), prompt=[1, 98]), [AdapterFacts(vocab_size=97)], BASE)


@pytest.mark.parametrize(
    ("prompt", "start"),
    [([7, 8, 1, 7, 8, 2], 3), ([7, 8], 0), ([8, 7], NEVER), ([7], NEVER), ([7, 8, 7], 0)],
)
def test_an_activated_adapter_acts_from_its_last_invocation_on(prompt, start):
    assert last_occurrence(prompt, [7, 8]) == start
    request = request_of((FIRST, 1.0), prompt=prompt)
    admit(request, [AdapterFacts(invocation_tokens=[7, 8])], BASE)
    assert request.adapters_from == start


def test_its_own_end_and_rope_hold_for_a_request_of_that_adapter_alone():
    own = AdapterFacts(eos_token_ids=[7, 9], rope_scaling="{}", rope_switch_len=32)
    request = request_of((FIRST, 1.0))
    admit(request, [own], BASE)
    assert request.eos_ids((1,)) == (7, 9)
    assert request.rope == OwnRope("{}", 32)
    together = request_of((FIRST, 1.0), (SECOND, 0.5))
    admit(together, [AdapterFacts(eos_token_ids=[7]), AdapterFacts()], BASE)
    assert together.eos_ids((1,)) == (1,) and together.rope is None


def test_the_context_is_the_adapters_own_where_it_has_one():
    long = request_of((FIRST, 1.0), prompt=[1] * 100)
    admit(long, [AdapterFacts(rope_scaling="{}", context_tokens=104)], BASE)
    with pytest.raises(InvalidRequest) as refused:
        admit(long, [AdapterFacts(rope_scaling="{}", context_tokens=103)], BASE)
    assert refused.value.violations[0].field == "sampling.max_tokens"
    with pytest.raises(InvalidRequest):
        admit(long, [AdapterFacts()], BASE)


@pytest.mark.parametrize(
    ("pooling", "task", "is_served"),
    [
        (Pooling.NONE, "CAUSAL_LM", True),
        (Pooling.NONE, "SEQ_CLS", False),
        (Pooling.NONE, "FEATURE_EXTRACTION", False),
        (Pooling.HEAD, "SEQ_CLS", True),
        (Pooling.HEAD, "CAUSAL_LM", False),
        (Pooling.MEAN, "FEATURE_EXTRACTION", True),
        (Pooling.LAST, "SEQ_CLS", True),
    ],
)
def test_an_adapter_answers_what_it_was_trained_for(pooling, task, is_served):
    request = request_of((FIRST, 1.0))
    request.pooling = pooling
    if is_served:
        admit(request, [AdapterFacts(task=task)], BASE)
        return
    with pytest.raises(InvalidRequest) as caught:
        admit(request, [AdapterFacts(task=task)], BASE)
    assert caught.value.violations[0].field == ("pooling" if pooling else "adapters")

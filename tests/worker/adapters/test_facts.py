"""What is checked once a request's adapters are known, and from where on they act."""

import pytest

from loraplex.errors import InvalidRequest
from services.worker.adapters.facts import NEVER, AdapterFacts, admit, last_place
from services.worker.request import AdapterSet, Request, SamplingParams

FIRST, SECOND = (f"sha256:{digit * 64}" for digit in "ab")
VOCAB = 100


def request_of(*adapters, prompt=(1, 2, 3), **sampling):
    params = SamplingParams(max_tokens=4, seed=1, **sampling)
    return Request("r", list(prompt), params, AdapterSet(tuple(adapters)))


@pytest.mark.parametrize("position", [0, 1])
def test_what_adds_to_no_other_adapter_is_refused_by_its_digest(position):
    facts = [AdapterFacts(), AdapterFacts()]
    facts[position] = AdapterFacts(alone_because="trains biases")
    with pytest.raises(InvalidRequest) as caught:
        admit(request_of((FIRST, 1.0), (SECOND, 0.5)), facts, VOCAB)
    (violation,) = caught.value.violations
    assert violation.field == "adapters"
    assert violation.value == (FIRST, SECOND)[position]
    assert "trains biases" in violation.description


def test_plain_adapters_combine_and_special_ones_run_alone():
    admit(request_of((FIRST, 1.0), (SECOND, 0.5)), [AdapterFacts()] * 2, VOCAB)
    admit(request_of((FIRST, 1.0)), [AdapterFacts(alone_because="uses DoRA")], VOCAB)


def test_dora_has_no_other_weight_than_one():
    with pytest.raises(InvalidRequest, match="weight"):
        admit(request_of((FIRST, 0.5)), [AdapterFacts(has_gain=True)], VOCAB)


@pytest.mark.parametrize("field", ["allowed_token_ids", "bad_token_ids", "stop_token_ids"])
def test_token_ids_are_those_of_the_adapter(field):
    resized = [AdapterFacts(vocab_size=VOCAB + 2)]
    admit(request_of((FIRST, 1.0), prompt=[VOCAB + 1], **{field: (VOCAB,)}), resized, VOCAB)
    with pytest.raises(InvalidRequest, match=field):
        admit(request_of((FIRST, 1.0), **{field: (1, VOCAB)}), [AdapterFacts()], VOCAB)


def test_tokens_that_an_adapter_cut_off_are_refused():
    with pytest.raises(InvalidRequest, match=r"prompt_ids\[1\]"):
        admit(request_of((FIRST, 1.0), prompt=[1, 98]), [AdapterFacts(vocab_size=97)], VOCAB)


@pytest.mark.parametrize(
    ("prompt", "start"),
    [([7, 8, 1, 7, 8, 2], 3), ([7, 8], 0), ([8, 7], NEVER), ([7], NEVER), ([7, 8, 7], 0)],
)
def test_an_activated_adapter_acts_from_its_last_invocation_on(prompt, start):
    assert last_place(prompt, [7, 8]) == start
    request = request_of((FIRST, 1.0), prompt=prompt)
    admit(request, [AdapterFacts(invocation_tokens=[7, 8])], VOCAB)
    assert request.adapters_from == start

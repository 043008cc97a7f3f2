"""Sampling: defaults, ranges and refusals that name the field."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from loraplex.api.sampling import Grammar, Sampling
from loraplex.errors import InvalidRequest
from loraplex_services.gateway.pipeline.sampling import ResolvedSampling, resolve
from loraplex_services.gateway.request import ServedModel
from loraplex_services.gateway.text.tokenizer import check_ids
from loraplex_services.gateway.workers.convert import default_sampling

BASE = ServedModel("base", vocab_size=100, max_model_len=64)


def _resolve(
    num_prompt_tokens: int = 4, *, chat: bool = False, base: ServedModel = BASE, **fields: object
) -> ResolvedSampling:
    return resolve(
        Sampling(**fields),
        base,
        num_prompt_tokens,
        fills_context=chat,
        draw_seed=lambda: 7,
    )


def test_unset_fields_take_their_defaults() -> None:
    resolved = _resolve()
    sampling = resolved.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (16, 1.0, 1.0)
    assert (sampling.seed, sampling.repetition_penalty, resolved.num_choices) == (7, 1.0, 1)
    assert sampling.logprobs is None


def test_chat_may_fill_the_context() -> None:
    assert _resolve(chat=True).sampling.max_tokens == 60
    assert _resolve(num_prompt_tokens=60).sampling.max_tokens == 4


def test_models_own_defaults_count_where_the_caller_says_nothing() -> None:
    text = '{"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": 2, "min_p": "x"}'
    base = ServedModel("b", 100, 64, default_sampling=default_sampling(text))
    assert base.default_sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 20.0}
    assert _resolve(base=base).sampling.top_k == 20
    assert _resolve(base=base, top_k=-1, temperature=0.0).sampling.top_k == 0
    assert _resolve(base=base, temperature=0.0).sampling.temperature == 0.0


@pytest.mark.parametrize("text", ["", "[]", "{broken"])
def test_unreadable_generation_config_means_no_defaults(text: str) -> None:
    assert default_sampling(text) == {}


def test_negative_seed_is_taken_as_64_bits() -> None:
    assert _resolve(seed=-1).sampling.seed == (1 << 64) - 1
    assert _resolve(seed=5).sampling.seed == 5


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    assert _resolve(echo=True, logprobs=3).sampling.prompt_logprobs == 3
    assert _resolve(logprobs=3).sampling.prompt_logprobs is None


def test_zero_max_tokens_is_for_echo_only() -> None:
    resolved = _resolve(max_tokens=0, echo=True)
    assert not resolved.emits_tokens
    assert not _resolve(num_prompt_tokens=64, max_tokens=0, echo=True).emits_tokens


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 61}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x" * 257,)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"),
        ({"stop_token_ids": (100,)}, "stop_token_ids"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"logit_bias": {100: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logprob_token_ids": (1,)}, "logprob_token_ids"),
        ({"logprobs": 0, "logprob_token_ids": (100,)}, "logprob_token_ids"),
        ({"logprobs": 0, "logprob_token_ids": tuple(range(21))}, "logprob_token_ids"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"bad_token_ids": (100,)}, "bad_token_ids"),
        ({"scale": math.inf}, "scale"),
    ],
    ids=str,
)
def test_value_out_of_range_is_named(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _resolve(**fields)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize("token_id", [-1, 110])
def test_token_id_under_an_adapter_is_refused_with_the_bases_range(token_id: int) -> None:
    base = replace(BASE, num_more_ids=10)
    assert _resolve(base=base, allowed_token_ids=(109,)).sampling.allowed_token_ids == (109,)
    with pytest.raises(InvalidRequest, match=r"outside 0\.\.99, and adapters add at most 10"):
        _resolve(base=base, allowed_token_ids=(token_id,))
    with pytest.raises(InvalidRequest, match=r"index 1 is outside 0\.\.99, and adapters add at"):
        check_ids((5, token_id), base)


@pytest.mark.parametrize(
    ("fields", "field"), [({"num_prompt_tokens": 64}, "prompt"), ({"max_tokens": 64}, "max_tokens")]
)
def test_what_exceeds_the_context_is_refused_in_words_that_clients_know(
    fields: dict[str, int], field: str
) -> None:
    with pytest.raises(
        InvalidRequest, match="this model's maximum context length is 64 "
    ) as caught:
        _resolve(**fields)
    assert caught.value.violations[0].field == field
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"


@pytest.mark.parametrize("grammar", [Grammar(), Grammar(regex="a" * (1 << 18))])
def test_a_grammar_without_a_form_or_too_long_is_refused(grammar: Grammar) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _resolve(grammar=grammar)
    assert caught.value.violations[0].field == "grammar"


def test_a_token_of_the_prompt_may_have_more_candidates_than_one_that_is_generated() -> None:
    assert _resolve(10, prompt_logprobs=256).sampling.prompt_logprobs == 256
    for fields in ({"prompt_logprobs": 257}, {"logprobs": 21}):
        with pytest.raises(InvalidRequest) as caught:
            _resolve(10, **fields)
        assert caught.value.violations[0].field in fields


@pytest.mark.hostile
@pytest.mark.parametrize("field", ["prompt_logprobs", "logprobs"])
def test_logprobs_of_a_long_prompt_in_many_choices_are_refused(field: str) -> None:
    long = ServedModel("long", vocab_size=100, max_model_len=1 << 17)
    fields: dict[str, object] = {field: 20, "echo": field == "logprobs"}
    assert _resolve(12_000, base=long, **fields).sampling.prompt_logprobs == 20
    for num_tokens, num_choices in ((13_000, 1), (2_000, 7)):
        with pytest.raises(InvalidRequest, match=r"make 2[79]\d{4} logprobs") as caught:
            _resolve(num_tokens, base=long, n=num_choices, **fields)
        assert caught.value.violations[0].field == "prompt_logprobs"

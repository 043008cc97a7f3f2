"""Every type of `loraplex.api` crosses its message unchanged, and its fields are the message's."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.api import wire
from loraplex.api.output import (
    Candidate,
    FinishReason,
    PackedLogprobs,
    ServedBy,
    Timings,
    TokenLogprob,
    Usage,
)
from loraplex.api.pooling import Pooling
from loraplex.api.residency import AdapterResidency, Tier, WorkerLoad
from loraplex.api.sampling import Grammar, Sampling, SamplingParams
from loraplex.errors import InvalidRequest
from loraplex.v1 import common_pb2, inference_pb2, worker_pb2
from tests.packing import packed_logprobs

UINT32 = st.integers(0, 2**32 - 1)
FLOAT = st.floats(width=32, allow_nan=False)
IDS = st.lists(UINT32, max_size=5).map(tuple)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=UINT32,
    seed=st.integers(0, 2**64 - 1),
    min_tokens=UINT32,
    temperature=FLOAT.map(abs),
    top_p=st.floats(0, 1, width=32, exclude_min=True),
    top_k=UINT32,
    min_p=st.floats(0, 1, width=32),
    stop_token_ids=IDS,
    ignore_eos=st.booleans(),
    repetition_penalty=st.floats(2**-10, 100, width=32),
    presence_penalty=FLOAT,
    frequency_penalty=FLOAT,
    logit_bias=st.dictionaries(UINT32, FLOAT).map(lambda biases: tuple(sorted(biases.items()))),
    allowed_token_ids=IDS,
    bad_token_ids=IDS,
    bad_sequences=st.lists(IDS, max_size=3).map(tuple),
    logprobs=st.none() | UINT32,
    logprob_token_ids=IDS,
    prompt_logprobs=st.none() | UINT32,
)
CANDIDATES = st.lists(st.builds(Candidate, UINT32, FLOAT), max_size=4).map(tuple)
LOGPROBS = st.builds(TokenLogprob, UINT32, FLOAT, CANDIDATES, UINT32)


def names_of(message_type: type) -> set[str]:
    return {field.name for field in message_type.DESCRIPTOR.fields}  # type: ignore[attr-defined]


def test_every_field_of_the_wire_is_one_of_ours() -> None:
    assert names_of(inference_pb2.SamplingParams) == {f.name for f in dataclasses.fields(Sampling)}
    assert names_of(worker_pb2.WorkerSampling) == {
        f.name for f in dataclasses.fields(SamplingParams)
    }
    assert names_of(common_pb2.Usage) == {f.name for f in dataclasses.fields(Usage)}
    assert names_of(common_pb2.Timings) == {f.name for f in dataclasses.fields(Timings)}
    assert names_of(inference_pb2.ServedBy) == {f.name for f in dataclasses.fields(ServedBy)}
    residency, load = (
        {f.name for f in dataclasses.fields(each)} for each in (AdapterResidency, WorkerLoad)
    )
    assert names_of(worker_pb2.AdapterResidency) == residency
    assert names_of(worker_pb2.WorkerLoad) - {"full"} == load - {"is_full"}
    assert names_of(common_pb2.Grammar) == {f.name for f in dataclasses.fields(Grammar)}


@given(PARAMS)
def test_resolved_parameters_arrive_as_they_were_sent(params: SamplingParams) -> None:
    message = wire.sampling_params_to_proto(params)
    received = worker_pb2.WorkerSampling.FromString(message.SerializeToString())
    assert wire.sampling_params_from_proto(received) == params


def test_what_a_message_leaves_out_is_off() -> None:
    params = wire.sampling_params_from_proto(worker_pb2.WorkerSampling(max_tokens=3))
    assert params == SamplingParams(max_tokens=3, seed=0)
    assert (params.top_p, params.repetition_penalty, params.temperature) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.0, logprobs=0, skip_special_tokens=False, echo=True),
        Sampling(stop=("a", "b"), stop_token_ids=(1,), logit_bias={7: -1.5}, n=3, seed=2**64 - 1),
        Sampling(grammar=Grammar(choice=("yes", "no")), min_p=0.25, scale=-2.0),
    ],
)
def test_requested_sampling_arrives_as_it_was_sent(sampling: Sampling) -> None:
    message = wire.sampling_to_proto(sampling)
    received = inference_pb2.SamplingParams.FromString(message.SerializeToString())
    assert wire.sampling_from_proto(received) == sampling


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(json_schema={"type": "object"}),
        Grammar(regex=""),
        Grammar(ebnf='start: "a"'),
        Grammar(choice=["yes", "no"]),
        Grammar(choice=()),
    ],
)
def test_a_grammar_of_each_form_arrives_as_it_was_sent(grammar: Grammar) -> None:
    message = wire.grammar_to_proto(grammar)
    assert message.WhichOneof("form") == grammar.form
    assert wire.grammar_from_proto(message) == grammar


@pytest.mark.parametrize("grammar", [Grammar(), Grammar(regex="a", ebnf="b")])
def test_a_grammar_without_one_form_is_refused(grammar: Grammar) -> None:
    assert (grammar.form, grammar.texts) == ("", ())
    with pytest.raises(InvalidRequest, match="exactly one"):
        wire.grammar_to_proto(grammar)


def test_a_grammar_message_without_a_form_becomes_a_grammar_without_one() -> None:
    assert wire.grammar_from_proto(common_pb2.Grammar()) == Grammar()


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons_cross_and_none_means_still_growing(reason: FinishReason | None) -> None:
    number = wire.finish_reason_to_proto(reason)
    assert wire.finish_reason_from_proto(number) == reason
    suffix = "UNSPECIFIED" if reason is None else reason.name
    assert common_pb2.FinishReason.Name(number) == f"FINISH_REASON_{suffix}"


@given(st.lists(LOGPROBS, max_size=4))
def test_logprobs_cross_with_a_prompt_that_begins_without_one(entries: list[TokenLogprob]) -> None:
    messages = [wire.logprob_to_proto(entry) for entry in (None, *entries)]
    assert wire.prompt_logprobs_from_proto(messages) == (None, *entries)
    assert wire.logprobs_from_proto(messages[1:]) == tuple(entries)


@given(st.lists(st.lists(st.builds(Candidate, UINT32, FLOAT), min_size=3, max_size=3), max_size=5))
def test_packed_logprobs_cross_however_a_prompt_was_cut(rows: list[list[Candidate]]) -> None:
    entries = [TokenLogprob(*own, tuple(top), rank) for rank, (own, *top) in enumerate(rows)]
    packed = packed_logprobs(entries[:2]).followed_by(packed_logprobs(entries[2:]))
    packed = wire.from_message(wire.to_message(packed, worker_pb2.PackedLogprobs), PackedLogprobs)
    assert packed.entries() == (None, *entries) and len(packed) == len(entries)


def test_minus_infinity_is_a_logprob() -> None:
    [entry] = wire.logprobs_from_proto([wire.logprob_to_proto(TokenLogprob(1, -math.inf))])
    assert entry.logprob == -math.inf


def test_poolings_cross_and_those_of_the_receiver_are_unspecified() -> None:
    for pooling in (Pooling.LAST, Pooling.MEAN, Pooling.HEAD):
        number = wire.pooling_to_proto(pooling)
        assert common_pb2.Pooling.Name(number) == f"POOLING_{pooling.name}"
        assert wire.pooling_from_proto(number) is pooling
    for pooling in (Pooling.NONE, Pooling.DEFAULT):
        assert wire.pooling_to_proto(pooling) == common_pb2.POOLING_UNSPECIFIED
    assert wire.pooling_from_proto(common_pb2.POOLING_UNSPECIFIED) is Pooling.NONE
    assert wire.pooling_from_proto(99) is None  # type: ignore[arg-type]


def test_counts_times_and_what_ran_arrive_as_they_were_sent() -> None:
    assert Usage(5, 7, 3).total_tokens == 12
    for sent, message in (
        (Usage(5, 7, 3), common_pb2.Usage),
        (Timings(0.5, 0.25, 0.125), common_pb2.Timings),
        (ServedBy(("t/a:v1",), ("sha256:0",), "w", "base"), inference_pb2.ServedBy),
    ):
        assert wire.from_message(wire.to_message(sent, message), type(sent)) == sent


@pytest.mark.parametrize("tier", Tier)
def test_residency_arrives_as_it_was_sent(tier: Tier) -> None:
    residency = AdapterResidency("sha256:0", tier, 8, 1 << 33, True, 2, 4096 * (tier is Tier.HOST))
    message = wire.residency_to_proto(residency)
    assert wire.residency_from_proto(message) == residency
    suffix = {Tier.NONE: "UNSPECIFIED", Tier.HOST: "DISK"}.get(tier, tier.name)
    assert worker_pb2.AdapterTier.Name(message.tier) == f"ADAPTER_TIER_{suffix}"


def test_a_copy_in_host_memory_does_not_change_where_a_loaded_adapter_is() -> None:
    residency = AdapterResidency("sha256:0", Tier.DEVICE, 8, 1 << 33, host_bytes=4096)
    assert wire.residency_from_proto(wire.residency_to_proto(residency)) == residency


def test_load_arrives_as_it_was_sent() -> None:
    load = WorkerLoad(1, 2, 3, 4, 5, 0.5, 6.0, 7, 8, 9, is_full=True, idle_blocks=11)
    assert wire.load_from_proto(wire.load_to_proto(load)) == load


def test_plain_types_load_without_protobuf_and_grpc() -> None:
    program = (
        "import sys; from loraplex.api import output, pooling, residency, sampling;"
        "sys.exit(any(name.split('.')[0] in ('google', 'grpc') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

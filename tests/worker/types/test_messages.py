"""Frames and messages between the API server process and the engine."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.api.output import Candidate, FinishReason, TokenLogprob
from loraplex.api.pooling import Pooling
from loraplex.api.request import AdapterSet, WorkerRequest
from loraplex.api.residency import AdapterResidency, Tier, WorkerLoad
from loraplex.api.sampling import Grammar, GrammarTokens, SamplingParams
from loraplex.errors import DataLoss, InvalidRequest, LoraplexError, ResourceExhausted
from loraplex_services.worker.types.messages import (
    AdapterFetched,
    Cancel,
    Command,
    Failure,
    FetchFailed,
    FrameBuffer,
    Gone,
    Ping,
    Prefetch,
    ResidencyChange,
    StepInput,
    StepOutput,
    Submit,
    TokenOutput,
    UnloadAdapter,
    Unpin,
    WireError,
    decode_input,
    decode_message,
    frame,
)
from tests.packing import packed_logprobs

DIGEST = "sha256:" + "a" * 64
SUBMIT = Submit(
    request=WorkerRequest(
        request_id="1/r",
        prompt_ids=[0, 1, 2**31],
        output_ids=[7],
        sampling=SamplingParams(
            max_tokens=9, seed=2**64 - 1, logit_bias=((3, -1.5),), stop_token_ids=(4, 5), logprobs=0
        ),
        adapters=AdapterSet(((DIGEST, 0.5),)),
        tenant="t",
        priority=-3,
        fairness_weight=2.0,
        cache_salt="s",
        sample_index=2,
        remaining_s=None,
        grammar=Grammar(choice=("yes", "no")),
        grammar_tokens=GrammarTokens(((5, "<x>"),), (6,)),
        pooling=Pooling.MEAN,
        remaining_first_token_s=0.5,
    ),
    came_s=1.5,
)
COMMANDS: list[Command] = [
    SUBMIT,
    Cancel("1/r"),
    AdapterFetched(DIGEST, "/cache/a", 8),
    FetchFailed(DIGEST, WireError.of(DataLoss("damaged"))),
    Gone(DIGEST),
    Prefetch(DIGEST, pin=True),
    Unpin(DIGEST),
    UnloadAdapter(DIGEST),
    Ping(),
]
OUTPUT = StepOutput(
    step=7,
    tokens=[
        TokenOutput(
            "1/r",
            [3],
            0,
            finish_reason=FinishReason.STOP,
            stop_token_id=3,
            logprobs=[TokenLogprob(3, -0.25, (Candidate(3, -0.25), Candidate(9, -2.0)))],
            prompt_logprobs=packed_logprobs([TokenLogprob(1, -3.0)]),
        )
    ],
    failures=[Failure("1/q", WireError.of(DataLoss("damaged")))],
    residency=[ResidencyChange(AdapterResidency(DIGEST, Tier.DEVICE, 8, 4096, True, 2))],
    load=WorkerLoad(steps=3),
)


def body(message: msgspec.Struct) -> bytes:
    [data] = FrameBuffer().feed(frame(message))
    return data


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_every_command_arrives_as_it_was_sent(command: Command) -> None:
    assert decode_input(body(StepInput([command]))).commands == [command]


def test_commands_keep_their_order() -> None:
    assert decode_input(body(StepInput(COMMANDS))).commands == COMMANDS


def test_outputs_arrive_as_they_were_sent() -> None:
    assert decode_message.decode(body(OUTPUT)) == OUTPUT


@given(st.lists(st.integers(1, 60), max_size=30))
def test_frames_survive_any_cutting_of_the_stream(sizes: list[int]) -> None:
    messages = [StepInput([Cancel("x" * size)]) for size in (0, 1, 200)]
    stream = b"".join(frame(message) for message in messages)
    buffer, bodies = FrameBuffer(), []
    for size in [*sizes, len(stream)]:
        bodies += buffer.feed(stream[:size])
        stream = stream[size:]
    assert [decode_input(data) for data in bodies] == messages


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest.field("prompt_ids", "[]", "must hold at least one token"),
        ResourceExhausted("full", reason="ADAPTER_TOO_LARGE", retry_after_s=2.5),
        LoraplexError("unknown"),
    ],
)
def test_errors_keep_type_reason_and_fields(error: LoraplexError) -> None:
    back = WireError.of(error).to_error()
    assert type(back) is type(error)
    assert (back.message, back.reason, back.violations, back.retry_after_s) == (
        error.message,
        error.reason,
        error.violations,
        error.retry_after_s,
    )

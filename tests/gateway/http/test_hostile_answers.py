"""Odd values in requests and answers, and what errors tell of the machine."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from loraplex.adapter_format import File
from loraplex.api.output import Candidate, PackedLogprobs, TokenLogprob
from loraplex.api.residency import WorkerLoad
from loraplex.errors import InvalidRequest, LoraplexError, NotFound, PermissionDenied
from loraplex.v1 import inference_pb2, inference_pb2_grpc, worker_pb2
from loraplex_services.common import limits
from loraplex_services.common.callers import LOCAL, Caller
from loraplex_services.gateway.http import answering, logprobs, sse
from loraplex_services.gateway.http.body import Body
from loraplex_services.gateway.http.lora_folders import LoraFolders
from loraplex_services.gateway.http.sse import compact_json, json_in_parts
from loraplex_services.gateway.pipeline.collected_bytes import bytes_of
from loraplex_services.gateway.request import RunningAdapter, Target, TextDelta
from loraplex_services.gateway.workers.convert import tokens_from_wire
from loraplex_services.worker.server.convert import token_to_wire
from loraplex_services.worker.types.messages import (
    FrameBuffer,
    StepOutput,
    TokenOutput,
    decode_message,
    frame,
)
from tests.gateway.conftest import Stack
from tests.packing import packed_logprobs

pytestmark = pytest.mark.hostile
LOAD = WorkerLoad(steps=1)


@pytest.mark.parametrize("key", ["--5", "-", "", "5.0", "\u00b2", "9" * 30])
def test_a_bias_whose_key_is_no_token_id_is_an_invalid_request(key: str) -> None:
    with pytest.raises(InvalidRequest, match="not a token id"):
        Body({"logit_bias": {key: 1}}).bias("logit_bias")


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logprobs_that_json_lacks_are_shown_as_the_least_one(value: float) -> None:
    assert logprobs.finite(value) == logprobs.LEAST_LOGPROB
    assert logprobs.finite(-1.5) == -1.5


def test_an_answer_that_is_not_finite_is_an_error_and_no_json_of_another_kind() -> None:
    with pytest.raises(LoraplexError) as caught:
        compact_json({"data": [{"embedding": [1.0, math.nan]}]})
    assert caught.value.reason == "NOT_FINITE"


async def test_a_gateway_that_waits_for_its_registry_does_not_tell_where_that_is(
    stack: Stack,
) -> None:
    await stack.start(ready=False)
    reason = stack.running._first_missing()
    assert stack.registry_address not in reason


async def test_an_answer_names_the_tokenizer_and_template_that_digests_leave_out(
    stack: Stack,
) -> None:
    await stack.start()
    answer = await stack.openai().completions.with_raw_response.create(model="base", prompt="hi")
    [base] = stack.running._fleet.bases().values()
    assert answer.headers["x-loraplex-tokenizer-digest"] == base.tokenizer_digest
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(model="base", text="hi"))
        first = await anext(aiter(call))
    assert first.served_by.tokenizer_digest == base.tokenizer_digest

    def with_template(sha256: str) -> Target:
        template = File("chat_template.jinja", 9, sha256)
        return Target("base", (RunningAdapter("a/b:v1", "sha256:same", text_files=(template,)),))

    plain = Target("base", (RunningAdapter("a/b:v1", "sha256:same"),))
    other_base = replace(base, tokenizer_digest="sha256:other")
    ours, theirs = with_template("a"), with_template("b")
    assert plain.tokenizer_digest(base) == base.tokenizer_digest
    digests = [each.tokenizer_digest(base) for each in (plain, ours, theirs)]
    assert len({*digests, ours.tokenizer_digest(other_base)}) == 4
    assert with_template("a").tokenizer_digest(base) == digests[1]


class RefusingRegistry:
    """A registry client whose uploads fail with an error that names the folder."""

    async def __aenter__(self) -> RefusingRegistry:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def upload(self, path: Path, *_: object) -> None:
        raise InvalidRequest.field(str(path), "", f"{path}/adapter_config.json is missing")


async def _load(root: Path, scope: str) -> None:
    client: Any = lambda _: RefusingRegistry()  # noqa: E731
    folders = LoraFolders(client, root, None)  # type: ignore[arg-type]  # fails before it resolves
    caller = Caller("acme", "k1", frozenset({scope}))
    await folders.load("key", caller, "a", "upper", in_place=True)


async def test_a_reader_is_refused_before_a_folder_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoraFolders, "_inside", None)
    monkeypatch.setattr(LoraFolders, "_holds_adapter", None)
    with pytest.raises(PermissionDenied, match="publisher"):
        await _load(tmp_path, "reader")
    folders = LoraFolders(None, tmp_path, None)  # type: ignore[arg-type]  # neither is asked
    reader = Caller("acme", "k1", frozenset({"reader"}))
    assert await folders.adopted("key", reader, "upper") == "upper"


async def test_errors_of_loading_a_folder_do_not_tell_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "acme" / "upper").mkdir(parents=True)
    with pytest.raises(InvalidRequest) as caught:
        await _load(tmp_path, "publisher")
    error = caught.value
    said = error.message + "".join(f"{v.field}{v.value}{v.description}" for v in error.violations)
    assert str(tmp_path) not in said
    assert "adapter_config.json is missing" in said


@pytest.mark.parametrize("folder", ["../globex/upper", "upper", "{root}/globex/upper", "link"])
async def test_a_tenant_publishes_only_folders_of_its_own(tmp_path: Path, folder: str) -> None:
    for name in ("globex/upper", "upper", "acme"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "acme" / "link").symlink_to(tmp_path / "globex" / "upper")
    client: Any = lambda _: RefusingRegistry()  # noqa: E731
    folders = LoraFolders(client, tmp_path, None)  # type: ignore[arg-type]  # fails before it resolves
    acme = Caller("acme", "k1", frozenset({"publisher"}))
    with pytest.raises(NotFound, match="LORAPLEX_LORA_ROOT/acme"):
        await folders.load("key", acme, "a", folder.format(root=tmp_path), in_place=True)
    for caller in (LOCAL, Caller("default", "k2", frozenset({"root"}))):
        with pytest.raises(InvalidRequest, match="adapter_config"):
            await folders.load("key", caller, "a", "globex/upper", in_place=True)


async def test_the_loads_of_one_tenant_leave_others_theirs(tmp_path: Path) -> None:
    """Large files are hashed in threads, of which a gateway has few."""
    reading: list[str] = []

    class SlowRegistry(RefusingRegistry):
        async def upload(self, path: Path, *_: object) -> None:
            reading.append(path.parent.name)
            await asyncio.Event().wait()

    client: Any = lambda _: SlowRegistry()  # noqa: E731
    folders = LoraFolders(client, tmp_path, None)  # type: ignore[arg-type]  # none ends
    for tenant in ("acme", "globex"):
        (tmp_path / tenant / "upper").mkdir(parents=True)
    callers = [Caller(tenant, "k1", frozenset({"publisher"})) for tenant in ("acme", "globex")]
    loads = [
        asyncio.ensure_future(folders.load("key", caller, f"a{i}", "upper", in_place=True))
        for caller in callers
        for i in range(limits.MAX_FOLDER_LOADS)
    ]
    while "globex" not in reading:
        await asyncio.sleep(0)
    assert reading.count("acme") == limits.MAX_FOLDER_LOADS_PER_TENANT
    for load in loads:
        load.cancel()
    await asyncio.gather(*loads, return_exceptions=True)


def test_the_tokens_of_a_text_are_formatted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = sse._encode_part

    def noted(value: object) -> bytes:
        sizes.append(len(value) if isinstance(value, list | tuple) else 1)
        return plain(value)

    monkeypatch.setattr(sse, "_encode_part", noted)
    body = {"count": 10_000, "tokens": tuple(range(10_000))}
    assert json_in_parts(body) == compact_json(body).encode()
    assert max(sizes) <= 1000


LOGPROBS = {"tokens": ["a"] * 200, "top_logprobs": [{"a": -1.5, "b": -2.5}] * 200}


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"choices": []},
        {"choices": [{"index": i, "logprobs": LOGPROBS} for i in range(100)], "usage": {"n": 1}},
        {"choices": [{"logprobs": {"content": [{"top_logprobs": [{"bytes": [1]}]}] * 150}}]},
        [[], [None, 'x"', {"é": [1.5]}]],
    ],
)
def test_an_answer_in_parts_is_the_same_json(value: Any) -> None:
    assert json_in_parts(value) == compact_json(value).encode()


async def test_the_event_loop_goes_on_while_an_answer_with_many_logprobs_is_formatted(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def noted(value: object) -> bytes:
        threads.append(threading.get_ident())
        return json_in_parts(value)

    monkeypatch.setattr(answering, "json_in_parts", noted)
    await stack.start()
    complete = stack.openai().completions.create
    for more in ({}, {"logprobs": 2}, {"logprobs": 2, "n": 2}):
        await complete(model="base", prompt="hello", max_tokens=4, **more)
    assert len(threads) == 2 and threading.get_ident() not in threads


async def test_large_answers_of_one_tenant_are_formatted_one_after_another(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop waits for each thread that computes in Python."""
    together = threading.Barrier(2)
    met: list[bool] = []

    def noted(value: object) -> bytes:
        try:
            together.wait(0.2)
            met.append(True)
        except threading.BrokenBarrierError:
            met.append(False)
            together.reset()
        return json_in_parts(value)

    monkeypatch.setattr(answering, "json_in_parts", noted)
    await stack.start()
    complete = stack.openai().completions.create
    body = {"model": "base", "prompt": "hello", "max_tokens": 4, "logprobs": 2}
    await asyncio.gather(*(complete(**body) for _ in range(3)))
    assert met == [False] * 3


async def test_the_event_loop_goes_on_while_prompt_logprobs_become_messages(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def noted(packed: PackedLogprobs) -> tuple[TokenLogprob | None, ...]:
        threads.append(threading.get_ident())
        return unpack(packed)

    unpack = PackedLogprobs.entries
    monkeypatch.setattr(PackedLogprobs, "entries", noted)
    await stack.start()
    sampling = inference_pb2.SamplingParams(prompt_logprobs=1, max_tokens=2)
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(model="base", text="abc", sampling=sampling)
        messages = [message async for message in stub.Generate(request)]
    assert len(messages[0].prompt_logprobs) == 4
    assert threads and threading.get_ident() not in threads


def test_no_event_loop_makes_an_object_of_each_logprob_of_a_prompt() -> None:
    top = tuple(Candidate(i, -1.0) for i in range(20))
    packed = packed_logprobs([TokenLogprob(7, -0.5, top)] * 2000)
    body = frame(StepOutput(1, [TokenOutput("r", [3], 0, prompt_logprobs=packed)], [], [], LOAD))
    before = sys.getallocatedblocks()
    output = decode_message.decode(FrameBuffer().feed(body)[0])
    assert isinstance(output, StepOutput)
    sent = token_to_wire("r", output.tokens[0]).SerializeToString()
    tokens = tokens_from_wire(worker_pb2.TokenEvent.FromString(sent), "w")
    assert sys.getallocatedblocks() - before < 500
    assert tokens.prompt_logprobs == packed and bytes_of(TextDelta(0, prompt_logprobs=packed)) > 4e6

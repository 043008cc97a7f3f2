"""The experts of each token through the whole stack, also when a tag moves or a worker dies."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from loraplex import BlockingRegistry, InferenceClient, Publication, Sampling
from loraplex.client.generation import CompletionChunk
from loraplex.client.inference_client import collect
from tests.e2e import stack as stacks
from tests.e2e.stack import BASE_ID, Stack
from tests.e2e.test_any_base import save_tokenizer
from tests.worker.parity.adapters import make_adapter
from tests.worker.parity.bases import TinyBase, make_base
from tests.worker.parity.reference import Reference
from tests.worker.parity.router_choices import chosen_by

pytestmark = pytest.mark.long

FEATURES = ("experts-down", "experts")
"""The first is on routers, too."""
NUM_NEW_TOKENS = 300
_RNG = random.Random(5)
PROMPT = [_RNG.randrange(300) for _ in range(70)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TinyBase:
    root = tmp_path_factory.mktemp("mixture")
    base = make_base("qwen3-moe", root / "base")
    save_tokenizer(base.folder)
    for feature in FEATURES:
        make_adapter(base, feature, root / feature)
    return base


@pytest.fixture(scope="module")
def mixture(base: TinyBase) -> Iterator[Stack]:
    root = base.folder.parent
    running = stacks.start(root / "state", "--dtype", "float32", model=base.folder)
    try:
        for feature in FEATURES:
            running.publish(root / feature, name=feature)
        yield running
    finally:
        assert running.stop() == 0


@pytest.fixture(scope="module")
def reference(base: TinyBase) -> Reference:
    return Reference(base, {feature: base.folder.parent / feature for feature in FEATURES})


def expected(reference: Reference, name: str | None, token_ids: list[int]) -> np.ndarray:
    """Of all tokens but the last."""
    return chosen_by(reference.model(name), token_ids[:-1], 3)


def publish(stack: Stack, folder: Path, name: str) -> str:
    """From memory, in a few milliseconds. Returns the digest."""
    config = json.loads((folder / "adapter_config.json").read_bytes())
    tensors = load_file(folder / "adapter_model.safetensors")
    with BlockingRegistry(stack.registry) as registry:
        return registry.publish(tensors, config, Publication(name)).version.digest


@pytest.mark.parametrize("name", [None, *FEATURES])
def test_http_returns_what_the_routers_of_transformers_choose(
    mixture: Stack, reference: Reference, name: str | None
) -> None:
    fields = {"max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    answer = mixture.complete(name or BASE_ID, PROMPT, return_routed_experts=True, **fields)
    choice = answer["choices"][0]
    experts = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    tokens = [*PROMPT, *choice["token_ids"]]
    assert experts.tolist() == expected(reference, name, tokens).tolist()
    later = mixture.complete(
        name or BASE_ID,
        PROMPT,
        return_routed_experts="raw",
        routed_experts_prompt_start=50,
        **fields,
    )
    raw = later["choices"][0]["routed_experts"]
    assert raw["start"] == 50
    assert base64.b64decode(raw["data"]) == experts[50:].tobytes()
    assert later["usage"]["prompt_tokens_details"]["cached_tokens"] == 48


async def streamed(
    stack: Stack, model: str, after: int, disturb: str | Path
) -> list[CompletionChunk]:
    """The chunks of a long answer, in whose middle the tag moves or a worker is killed."""
    chunks: list[CompletionChunk] = []
    sampling = Sampling(max_tokens=NUM_NEW_TOKENS, ignore_eos=True, temperature=0.0)
    async with InferenceClient(stack.grpc) as client:
        async for chunk in client.generate(
            model, PROMPT, sampling, on_update="follow", routed_from=0
        ):
            chunks.append(chunk)
            if sum(len(each.token_ids) for each in chunks) < after:
                continue
            after = NUM_NEW_TOKENS + 1
            if isinstance(disturb, Path):
                await asyncio.to_thread(publish, stack, disturb, model)
            else:
                stack.service(disturb).kill()
    return chunks


def test_experts_are_those_of_the_version_that_chose_the_next_token(
    mixture: Stack, base: TinyBase, reference: Reference
) -> None:
    root = base.folder.parent
    first = publish(mixture, root / FEATURES[0], "policy")
    chunks = asyncio.run(streamed(mixture, "policy", 20, root / FEATURES[1]))
    (choice,) = collect(chunks).choices
    assert [span.digests[0] == first for span in choice.spans] == [True, False]
    tokens = [*PROMPT, *choice.token_ids]
    old, new = (expected(reference, feature, tokens) for feature in FEATURES)
    cut = len(PROMPT) - 1 + choice.spans[1].start
    routed = choice.routed_experts
    assert routed is not None
    found = np.frombuffer(routed.experts, routed.dtype).reshape(routed.shape)
    assert found.tolist() == [*old[:cut].tolist(), *new[cut:].tolist()]
    assert old[cut:].tolist() != new[cut:].tolist()


def test_a_worker_that_replaces_a_killed_one_continues_its_experts(
    mixture: Stack, reference: Reference
) -> None:
    chunks = asyncio.run(streamed(mixture, FEATURES[0], 20, "loraplex_services.worker"))
    (choice,) = collect(chunks).choices
    assert len(choice.token_ids) == NUM_NEW_TOKENS
    tokens = [*PROMPT, *choice.token_ids]
    routed = choice.routed_experts
    assert routed is not None
    found = np.frombuffer(routed.experts, routed.dtype).reshape(routed.shape)
    assert found.tolist() == expected(reference, FEATURES[0], tokens).tolist()

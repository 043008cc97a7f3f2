"""The async client of the gateway: stream or collect text, list models, inspect the stack."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Self

from loraplex.api.output import ServedBy, Usage, WeightSpan, joined_experts, joined_spans
from loraplex.api.request import UpdatePolicy
from loraplex.api.sampling import Sampling
from loraplex.api.wire import from_message
from loraplex.client import generation_wire, settings, vectors
from loraplex.client.channel import Channel
from loraplex.client.generation import (
    Choice,
    Completion,
    CompletionChunk,
    Fetched,
    Mirrored,
    Model,
    Prompt,
    Status,
)
from loraplex.client.settings import Credentials
from loraplex.client.vectors import Embeddings, Scores
from loraplex.errors import Unavailable
from loraplex.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from loraplex.v1 import inference_pb2 as pb

PAGE_SIZE = 500
FETCH_TIMEOUT_S = 300.0
DEFAULTS = Sampling()


class InferenceClient:
    """Talks to one gateway over gRPC. Use as an async context manager, inside one event loop.

    Methods raise the errors of `loraplex.errors`; Unavailable if no gateway answers.
    """

    def __init__(self, address: str | None = None, credentials: Credentials | None = None) -> None:
        """Without `address`, LORAPLEX_GATEWAY_ADDRESS names it.

        Without `credentials`, they come from LORAPLEX_API_KEY (or LORAPLEX_API_KEY_FILE),
        LORAPLEX_CA, LORAPLEX_CERT and LORAPLEX_KEY.
        """
        self._channel = Channel(
            address or settings.gateway_address(os.environ),
            credentials or settings.credentials(os.environ),
            "gateway",
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def generate(
        self,
        model: str,
        prompt: Prompt,
        sampling: Sampling = DEFAULTS,
        *,
        adapters: Mapping[str, float] | None = None,
        first_token_s: float | None = None,
        on_update: str = UpdatePolicy.FINISH,
        priority: int = 0,
        routed_from: int | None = None,
    ) -> AsyncGenerator[CompletionChunk, None]:
        """Stream the output of one prompt. Closing the iterator cancels the request.

        Args:
            model: a base id, or an adapter reference such as `upper:prod`.
            prompt: text, token ids, or messages for the chat template.
            adapters: weight by reference, to combine several adapters; `model` is then the base id.
            first_token_s: longest time to the first token. A request that cannot meet it fails
                immediately with `DeadlineExceeded`. None = only the call's deadline counts.
            on_update: what happens to the request if the tag that `model` names moves: "finish"
                with the same version, "follow" the tag from the next token on, or
                "follow_keep_prefix" to follow it without computing the tokens so far again.
            priority: among the requests of the caller's tenant; lower runs first.
            routed_from: first position of the prompt from which on each token's experts are
                returned, if the base is a mixture of experts; None = they are not.
        """
        request = generation_wire.generate_request(
            model,
            prompt,
            sampling,
            adapters,
            first_token_s=first_token_s,
            on_update=UpdatePolicy.parse(on_update),
            priority=priority,
            routed_from=routed_from,
        )
        stub = self._channel.stub(inference_pb2_grpc.InferenceServiceStub)
        async with aclosing(self._channel.stream(stub.Generate, request)) as responses:
            async for response in responses:
                yield generation_wire.chunk(response)

    async def complete(
        self,
        model: str,
        prompt: Prompt,
        sampling: Sampling = DEFAULTS,
        *,
        adapters: Mapping[str, float] | None = None,
        first_token_s: float | None = None,
        on_update: str = UpdatePolicy.FINISH,
        routed_from: int | None = None,
    ) -> Completion:
        """Collect the whole output of one prompt. Arguments as for `generate`."""
        chunks = [
            chunk
            async for chunk in self.generate(
                model,
                prompt,
                sampling,
                adapters=adapters,
                first_token_s=first_token_s,
                on_update=on_update,
                routed_from=routed_from,
            )
        ]
        return collect(chunks)

    async def embed(
        self,
        model: str,
        inputs: str | Sequence[Prompt],
        *,
        pooling: str = "",
        normalize: bool | None = None,
        dimensions: int = 0,
    ) -> Embeddings:
        """Compute a vector of each input.

        Args:
            model: a base id, or an adapter reference.
            inputs: one text, or prompts in any form.
            pooling: "last" token or "mean"; "" = as the adapter says, else "last".
            normalize: whether to scale vectors to length 1; None = as the adapter says, else yes.
            dimensions: number of leading values that are kept before normalising; 0 = all.
        """
        request = vectors.embed_request(model, inputs, pooling, normalize, dimensions)
        stub = self._channel.stub(inference_pb2_grpc.InferenceServiceStub)
        return vectors.embeddings(await self._channel.call(stub.Embed, request))

    async def score(self, model: str, inputs: str | Sequence[Prompt]) -> Scores:
        """Compute the scores of an adapter's classification head for each input.

        Args:
            model: an adapter reference.
            inputs: one text, or prompts in any form.
        """
        request = vectors.score_request(model, inputs)
        stub = self._channel.stub(inference_pb2_grpc.InferenceServiceStub)
        return vectors.scores(await self._channel.call(stub.Score, request))

    async def models(self) -> AsyncIterator[Model]:
        """Yield the bases, then the adapters that the caller may run."""
        stub = self._channel.stub(inference_pb2_grpc.InferenceServiceStub)
        request = pb.ListModelsRequest(page_size=PAGE_SIZE)
        async for page in self._channel.pages(stub.ListModels, request):
            for model in page.models:
                yield from_message(model, Model)

    async def status(self, *, include_adapters: bool = False) -> Status:
        """The gateway's view of workers, residency and load."""
        stub = self._channel.stub(admin_pb2_grpc.AdminServiceStub)
        request = admin_pb2.GetStatusRequest(include_adapters=include_adapters)
        return generation_wire.status(await self._channel.call(stub.GetStatus, request))

    async def mirrored(self, ref: str, share: float = 1.0) -> AsyncGenerator[Mirrored, None]:
        """Yield a share of the tenant's requests for a tag, each after it ended without an error.

        Needs a key with the scope "admin". Requests that ran with several adapters, choices or
        versions are left out, and so are requests that end while the caller is not reading.

        Args:
            ref: such as `upper:prod`.
            share: above 0 and at most 1.

        Raises:
            NotFound: there is no such tag.
        """
        stub = self._channel.stub(admin_pb2_grpc.AdminServiceStub)
        request = admin_pb2.MirrorRequestsRequest(ref=ref, share=share)
        async with aclosing(self._channel.stream(stub.MirrorRequests, request)) as responses:
            async for response in responses:
                yield generation_wire.mirrored(response)

    async def fetch(self, ref: str, num_workers: int = 1) -> Fetched:
        """Load an adapter on the worker that its requests will reach, or on several, before its
        first request.

        Raises:
            NotFound: there is no such adapter.
            PermissionDenied: the caller may not run it.
            Unavailable: no worker of its base is ready.
        """
        stub = self._channel.stub(admin_pb2_grpc.AdminServiceStub)
        request = admin_pb2.FetchAdapterRequest(ref=ref, num_workers=num_workers)
        done = await self._channel.call(stub.FetchAdapter, request, FETCH_TIMEOUT_S)
        return Fetched(done.ref, done.digest, tuple(done.worker_ids), done.took_s)


def collect(chunks: list[CompletionChunk]) -> Completion:
    """Join the chunks of a finished stream.

    Raises:
        Unavailable: the stream ended before every choice was finished.
    """
    usage = next((chunk.usage for chunk in reversed(chunks) if chunk.usage), None)
    by_index: dict[int, list[CompletionChunk]] = {}
    for chunk in chunks:
        by_index.setdefault(chunk.index, []).append(chunk)
    choices = tuple(_choice(by_index[index]) for index in sorted(by_index))
    if not choices:
        raise _ended_early()
    prompt_ids = next((chunk.prompt_token_ids for chunk in chunks if chunk.prompt_token_ids), ())
    return Completion(chunks[0].request_id, choices, usage or Usage(), prompt_ids)


def _choice(chunks: list[CompletionChunk]) -> Choice:
    last = chunks[-1]
    if last.finish_reason is None:
        raise _ended_early()
    served_by: ServedBy | None = next((p.served_by for p in chunks if p.served_by), None)
    return Choice(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(i for chunk in chunks for i in chunk.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        served_by=served_by,
        timings=last.timings,
        spans=_spans(chunks),
        reasoning="".join(chunk.reasoning for chunk in chunks),
        routed_experts=joined_experts(chunk.routed_experts for chunk in chunks),
    )


def _spans(chunks: list[CompletionChunk]) -> tuple[WeightSpan, ...]:
    spans = []
    start = 0
    for chunk in chunks:
        if chunk.token_ids:
            spans.append(WeightSpan(start, len(chunk.token_ids), chunk.digests))
            start += len(chunk.token_ids)
    return joined_spans(spans)


def _ended_early() -> Unavailable:
    return Unavailable("the stream ended early; send the request again")

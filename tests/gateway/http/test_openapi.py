"""The OpenAPI document: all endpoints, and schemas that hold for what is sent and answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import jsonschema
import openai
import pytest

from tests.gateway.conftest import Stack
from tests.gateway.http.documented import STREAM, check, check_exchange
from tests.gateway.http.talking import CALL, PARAMETERS, says, started_talker

USER: Any = {"role": "user", "content": "hi"}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


async def _document(stack: Stack) -> dict[str, Any]:
    client = stack.openai()
    document: dict[str, Any] = await client.get(f"{stack.url}/openapi.json", cast_to=object)  # type: ignore[assignment]
    return document


async def test_the_document_names_every_path_and_its_references_resolve(stack: Stack) -> None:
    await stack.start()
    document = await _document(stack)
    assert document["openapi"] == "3.1.0"
    paths = document["paths"]
    assert {"/v1/completions", "/v1/messages", "/pause", "/v1/models/{ref}"} <= paths.keys()
    assert set(paths["/v1/responses/{response_id}"]) == {"get", "delete"}
    assert "/openapi.json" in paths and not any(path.startswith("/console") for path in paths)
    schemas = document["components"]["schemas"]
    references = [
        part.partition('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]
    ]
    assert references and set(references) <= schemas.keys()
    summaries = [one["summary"] for path in paths.values() for one in path.values()]
    assert all(summaries)


async def test_what_the_official_client_exchanges_is_valid(stack: Stack) -> None:
    stack.registry.put("upper")
    talker = await started_talker(stack)
    says(talker, f"let me look\n</think>\n\nOne moment.\n{CALL}")
    counts = []

    async def hook(response: Any) -> None:
        counts.append(await check_exchange(response, reads_streams=True))

    transport = openai.DefaultAsyncHttpxClient(event_hooks={"response": [hook]})
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="none", max_retries=0, http_client=transport
    ) as client:
        extras = {"return_token_ids": True, "prompt_logprobs": 2, "top_k": 3}
        chat: dict[str, Any] = {"model": "upper", "messages": [USER], "tools": [TOOL]}
        await client.completions.create(
            model="upper", prompt=["a", "b"], n=2, logprobs=2, echo=True, stop=["z"]
        )
        await client.completions.create(model="upper", prompt="a", extra_body=extras)
        await client.chat.completions.create(
            **chat, logprobs=True, top_logprobs=2, extra_body=extras, max_completion_tokens=90
        )
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        streams = [
            await client.chat.completions.create(
                **chat, stream=True, stream_options=options, logprobs=True
            ),
            await client.completions.create(
                model="upper", prompt="a", stream=True, stream_options=options, logprobs=1
            ),
        ]
        for stream in streams:
            assert [event async for event in stream]
        await client.models.list()
        await client.models.retrieve("upper")
        await client.responses.create(model="upper", input="hi", instructions="Be brief.")
    # Events of streams count one by one; a request or response without a schema would count 0.
    assert len(counts) == 8
    assert counts[:3] == [2, 2, 2] and counts[5:] == [1, 1, 1]
    assert all(count > 2 for count in counts[3:5])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "m", "prompt": "a", "unknown": 1}),
        ("/v1/completions", {"model": "m", "prompt": 5}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"model": "m", "prompt": "a", "temperature": "hot"}),
        ("/v1/completions", {"model": "m", "prompt": "a", "temperature": -1}),
        ("/v1/completions", {"model": "m", "prompt": "a", "use_beam_search": True}),
        ("/v1/completions", {"model": "m", "prompt": "a", "adapters": [{"ref": 1}]}),
        ("/v1/chat/completions", {"model": "m", "messages": []}),
        ("/v1/chat/completions", {"model": "m", "messages": [{"content": "x"}]}),
        ("/inference/v1/generate", {"model": "m", "token_ids": ["a"], "sampling_params": {}}),
        ("/v1/messages", {"model": "m", "messages": [USER]}),
        ("/v1/rerank", {"model": "m", "query": "a"}),
        ("/detokenize", {"tokens": "a"}),
    ],
)
def test_what_is_refused_is_not_valid(path: str, body: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check(path, "POST", "request", body)


def test_what_no_endpoint_answers_is_not_valid() -> None:
    with pytest.raises(jsonschema.ValidationError):
        check("/v1/completions", "POST", STREAM, {"id": "a", "choices": []})
    with pytest.raises(jsonschema.ValidationError):
        check("/v1/completions", "POST", "error", {"error": "text"})
    assert check("/openapi.json", "GET", STREAM, None) is False


async def test_the_document_names_every_status_of_a_batch_and_purpose_of_a_file(
    stack: Stack, tmp_path: Path
) -> None:
    stack.objects_url = f"file://{tmp_path}"
    await stack.start()
    schemas = (await _document(stack))["components"]["schemas"]
    statuses = schemas["BatchObject"]["properties"]["status"]["enum"]
    assert set(statuses) == set(get_args(openai.types.Batch.model_fields["status"].annotation))
    assert schemas["FileObject"]["properties"]["purpose"] == {"enum": ["batch", "batch_output"]}

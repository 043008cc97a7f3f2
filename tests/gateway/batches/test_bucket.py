"""A batch whose files are in an S3 bucket."""

from __future__ import annotations

import pytest

from tests.gateway.conftest import Stack
from tests.gateway.http.test_batches import created, ended, lines_of, request
from tests.s3_servers import moto, new_bucket


@pytest.mark.long
async def test_files_and_batches_live_in_a_bucket(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moto() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        stack.objects_url = f"s3://{new_bucket()}/some/prefix"
        await stack.start()
        client = stack.openai()
        body = {"model": "base", "prompt": "abc", "max_tokens": 64}
        batch = await created(client, [request("a", body), b"{}", request("b", body)])
        batch = await ended(client, batch)
        assert batch.status == "completed"
        assert set(await lines_of(client, batch.output_file_id)) == {"a", "b"}
        assert set(await lines_of(client, batch.error_file_id)) == {None}

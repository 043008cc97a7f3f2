"""The gateways finish the batches that they find."""

from __future__ import annotations

import pytest

from loraplex_services.gateway.batches import layout, runner
from loraplex_services.gateway.batches.records import new_batch_id
from tests.gateway.conftest import Stack
from tests.gateway.http.test_batches import completion, created, ended, request


async def test_a_batch_that_cannot_be_read_keeps_no_other_from_its_end(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "POLL_S", 0.05)
    stack.objects_url = (stack.folder / "objects").as_uri()
    stack.registry.put("upper")
    batch_id = new_batch_id()
    for key, content in (
        (layout.unfinished("another", batch_id), b"{}"),
        (layout.batch_document("another", batch_id), b"{"),
    ):
        path = stack.folder / "objects" / key
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    await stack.start()
    client = stack.openai()
    batch = await ended(client, await created(client, [request("a", completion("abc"))]))
    assert batch.status == "completed"
    assert caplog.text.count("a damaged batch job was skipped") == 1, "it is looked at each time"

"""What a version's record says of its adapter's task, alongside the files."""

from __future__ import annotations

from loraplex.adapter_format.pooling_fields import PoolingFields
from loraplex.api.format_wire import adapter_pooling_from_proto
from loraplex.api.registry_wire import adapter_version
from loraplex.refs import parse_ref
from loraplex_services.registry.access.permissions import Access
from loraplex_services.registry.api.convert import version_to_proto
from loraplex_services.registry.assembly import Registry
from tests.adapter_format.builders import Adapter, Tensor
from tests.registry.house import CONFIG, TENSORS, opened, publish

ROOT = Access("default", "", frozenset({"root", "admin"}))


async def test_a_version_says_what_its_adapter_is_for_and_how_its_scores_are_read(
    registry: Registry,
) -> None:
    score = {"base_model.model.score.weight": Tensor("F32", (2, 8))}
    said = {"id2label": {"0": "bad", "1": "good"}, "pad_token_id": 3}
    adapter = Adapter().with_config(task_type="SEQ_CLS", **said).with_tensors(score)
    files = {CONFIG: adapter.config, TENSORS: adapter.tensors}
    await registry.publisher.finish(await opened(registry, "judge", files))
    await publish(registry, "plain", 1)
    judge, plain = [
        version_to_proto((await registry.lookup.resolve(parse_ref(name), ROOT)).version, None)
        for name in ("judge", "plain")
    ]
    assert not plain.HasField("pooling")
    assert adapter_version(plain).task == "CAUSAL_LM"
    fields = PoolingFields(labels=("bad", "good"), num_labels=2, pad_token_id=3)
    assert adapter_pooling_from_proto(judge.pooling) == ("SEQ_CLS", fields)
    assert (adapter_version(judge).task, adapter_version(judge).num_labels) == ("SEQ_CLS", 2)

"""A rope scaling by label and EOS ids by generation_config.json are part of what an upload is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraplex.adapter_format import parse_config, parse_manifest
from loraplex.client.publishing import Publication
from loraplex.errors import InvalidAdapter, InvalidRequest
from loraplex_services.registry import layout
from tests.registry.conftest import ServedRegistry
from tests.registry.house import adapter_files, write_folder

YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}


def folder_with(tmp_path: Path, **generation: object) -> Path:
    files = adapter_files(1)
    if generation:
        files["generation_config.json"] = json.dumps(generation).encode()
    return write_folder(tmp_path / "adapter", files)


async def test_both_are_in_digest_manifest_and_record(
    served: ServedRegistry, tmp_path: Path
) -> None:
    plain = await served.client.upload(folder_with(tmp_path), Publication("plain"))
    folder = folder_with(tmp_path, eos_token_id=[5, 3], temperature=0.2)
    publication = Publication("own", labels={"rope_scaling": json.dumps(YARN)})
    own = (await served.client.upload(folder, publication)).version
    assert own.digest != plain.version.digest
    assert (json.loads(own.rope_scaling), own.eos_token_ids) == (YARN, (3, 5))
    assert (plain.version.rope_scaling, plain.version.eos_token_ids) == ("", ())
    raw = (await served.registry.store.get(layout.blob(own.digest))).data
    config = parse_config(parse_manifest(raw).config_bytes)
    assert config.rope_scaling is not None and config.rope_scaling.to_fields() == YARN
    assert config.eos_token_ids == (3, 5)
    again = await served.client.upload(folder, publication)
    assert (again.version.version, again.created) == (1, False)


@pytest.mark.parametrize("value", ["x", [], -1, 1000])
async def test_eos_ids_that_the_base_cannot_have_are_refused_by_field(
    served: ServedRegistry, tmp_path: Path, value: object
) -> None:
    folder = folder_with(tmp_path, eos_token_id=value)
    for call in (served.client.check, served.client.upload):
        with pytest.raises(InvalidAdapter) as refused:
            await call(folder, Publication("sql"))
        assert refused.value.violations[0].field == "generation_config.json:eos_token_id"


async def test_a_label_that_is_no_scaling_is_refused_with_the_way_out(
    served: ServedRegistry, tmp_path: Path
) -> None:
    publication = Publication("sql", labels={"rope_scaling": '{"rope_type": "dynamic"}'})
    for call in (served.client.check, served.client.upload):
        with pytest.raises(InvalidRequest, match="yarn or linear") as refused:
            await call(folder_with(tmp_path), publication)
        assert refused.value.violations[0].field == "options.labels[rope_scaling]"

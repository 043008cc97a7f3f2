"""Finding a base and its tokenizer."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import tokenizers

from loraplex.errors import InvalidRequest, PermissionDenied, Unavailable
from loraplex_services.common.objects.file import FileStore
from loraplex_services.common.objects.store import ObjectInfo, ObjectStoreError
from loraplex_services.worker.server.base_files import fetch_model, find_model, read_tokenizer
from tests.sources.servers import Hub, served
from tests.worker import tiny


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "a/b/c", "plain"])
def test_what_is_neither_folder_nor_hub_id_is_refused(model: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        find_model(model, Path("unused"))
    assert caught.value.violations[0].field == "LORAPLEX_MODEL"


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        find_model(str(tmp_path), tmp_path)


def test_a_hub_id_that_is_cached_needs_no_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--acme--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--acme--tiny" / "refs").mkdir()
    (tmp_path / "models--acme--tiny" / "refs" / "main").write_text("abc")
    assert find_model("acme/tiny", tmp_path) == snapshot
    with pytest.raises(Unavailable, match="not cached"):
        find_model("acme/other", tmp_path)


@pytest.mark.parametrize("answer", [b"{", b"[]", b'{"sha": 1}', b"\xff"])
def test_a_hub_that_gives_an_unexpected_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    with served(lambda *_: (200, {"Content-Type": "application/json"}, answer)) as address:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://{address}")
        with pytest.raises(Unavailable, match="'acme/tiny': the hub gave an unexpected answer"):
            find_model("acme/tiny", tmp_path)


def test_only_files_that_are_read_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    kept = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}"}
    others = ("consolidated.safetensors", "original/params.json", "onnx/a.safetensors", "x.bin")
    hub = Hub(kept | dict.fromkeys(others, b"other"))
    with served(hub) as address:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://{address}")
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"http://{address}{template}")
        folder = find_model("acme/lora", tmp_path)
    found = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert found == kept.keys()


def test_a_hub_id_that_cannot_be_had_is_told_from_a_gated_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    with served(Hub({"config.json": b"{}"}, token="secret")) as address:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://{address}")
        with pytest.raises(PermissionDenied, match="'acme/lora' is gated: accept its terms"):
            find_model("acme/lora", tmp_path)
    with served(Hub({})) as address:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://{address}")
        with pytest.raises(InvalidRequest, match="'acme/nope' is not on the hub, or is private"):
            find_model("acme/nope", tmp_path)


async def stored_base(folder: Path) -> tuple[FileStore, dict[str, bytes]]:
    """A store with the files of a tiny base, and these files."""
    base, store = tiny.write_base(folder / "base"), FileStore(folder / "store")
    files = {file.name: file.read_bytes() for file in base.iterdir()}
    for name, content in files.items():
        await store.put(name, content)
    return store, files


def visible(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.iterdir() if file.name[0] != ".")
    return {file.name: file.read_bytes() for file in files}


async def test_a_model_in_a_store_is_copied_and_an_interrupted_copy_goes_on(
    tmp_path: Path,
) -> None:
    store, files = await stored_base(tmp_path)
    folder = tmp_path / "copy"
    await fetch_model(store, folder)
    (folder / "model.safetensors").write_bytes(b"short")
    kept = (folder / "config.json").stat().st_ino
    await fetch_model(store, folder)
    assert visible(folder) == files
    assert (folder / "config.json").stat().st_ino == kept


async def test_a_model_that_was_replaced_in_its_store_by_one_of_the_same_sizes_is_copied_again(
    tmp_path: Path,
) -> None:
    store, files = await stored_base(tmp_path)
    await store.put("model-00001-of-00002.safetensors", b"one shard")
    await fetch_model(store, tmp_path / "copy")
    files["model.safetensors"] = files["model.safetensors"][::-1]
    await store.put("model.safetensors", files["model.safetensors"])
    await store.delete("model-00001-of-00002.safetensors")
    await fetch_model(store, tmp_path / "copy")
    assert visible(tmp_path / "copy") == files


async def test_a_model_that_is_replaced_while_it_is_copied_is_copied_as_it_is_then(
    tmp_path: Path,
) -> None:
    class Replaced(FileStore):
        async def get_range(self, key: str, offset: int, length: int) -> bytes:
            data = await super().get_range(key, offset, length)
            if key == "model.safetensors" and data == files[key]:
                await self.put(key, data[::-1])
                await self.put("config.json", b"[]")
            return data

    _, files = await stored_base(tmp_path)
    await fetch_model(Replaced(tmp_path / "store"), tmp_path / "copy")
    reversed_weights = files["model.safetensors"][::-1]
    expected = files | {"model.safetensors": reversed_weights, "config.json": b"[]"}
    assert visible(tmp_path / "copy") == expected


async def test_a_copy_ends_in_a_folder_that_does_not_keep_the_times_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, files = await stored_base(tmp_path)
    monkeypatch.setattr(os, "utime", lambda path, times: None)
    await asyncio.wait_for(fetch_model(store, tmp_path / "copy"), 60)
    assert visible(tmp_path / "copy") == files


async def test_only_files_that_are_read_are_copied_from_a_store(tmp_path: Path) -> None:
    store, files = await stored_base(tmp_path)
    for key in ("consolidated.safetensors", "original/params.json", "pytorch_model.bin"):
        await store.put(key, b"other")
    await fetch_model(store, tmp_path / "copy")
    assert visible(tmp_path / "copy") == files


async def test_a_finished_copy_serves_while_its_store_is_away_and_an_unfinished_one_does_not(
    tmp_path: Path,
) -> None:
    class Away(FileStore):
        is_listed = False

        async def list_objects(
            self, prefix: str, start_after: str = ""
        ) -> AsyncIterator[ObjectInfo]:
            if not self.is_listed:
                raise ObjectStoreError("the store is away")
            async for info in super().list_objects(prefix, start_after):
                yield info

        async def get_range(self, key: str, offset: int, length: int) -> bytes:
            raise ObjectStoreError("the store is away")

    store, files = await stored_base(tmp_path)
    away, copy = Away(tmp_path / "store"), tmp_path / "copy"
    with pytest.raises(ObjectStoreError):
        await fetch_model(away, copy)
    await fetch_model(store, copy)
    assert await fetch_model(away, copy) == copy
    assert visible(copy) == files
    await store.put("config.json", b"{}")
    away.is_listed = True
    for _ in range(2):
        with pytest.raises(ObjectStoreError):
            await fetch_model(away, copy)
        away.is_listed = False


async def test_a_store_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        await fetch_model(FileStore(tmp_path / "store"), tmp_path / "copy")


def test_the_tokenizer_bundle_is_what_gateways_need(tmp_path: Path) -> None:
    base = tiny.write_base(tmp_path / "base")
    before = read_tokenizer(base)
    assert before.bos_token_id == 1 and before.generation_config_json == ""
    generation = {"temperature": 0.6, "bos_token_id": 2}
    (base / "generation_config.json").write_text(json.dumps(generation))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(base / "tokenizer.json"))
    after = read_tokenizer(base)
    assert [name for name, _ in after.files] == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
    ]
    assert after.bos_token_id == 2 and after.digest != before.digest
    assert json.loads(after.generation_config_json) == generation


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b'{"hidden_size": 64, '),
        ("generation_config.json", b"["),
        ("generation_config.json", '{"top_p": 1}'.encode("utf-16")),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE"}}'),
        ("tokenizer.json", b""),
        ("tokenizer_config.json", b""),
        ("special_tokens_map.json", b"[]"),
        ("chat_template.jinja", b"{% for message in %}"),
        ("chat_template.jinja", b"{{ messages | no_such_filter }}"),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_a_file_that_gateways_could_not_read_is_named(
    name: str, content: bytes, tmp_path: Path
) -> None:
    """They would ask for it again and again, and the stack would never become ready."""
    base = tiny.write_base(tmp_path / "base")
    (base / name).write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"copy or download the base again") as caught:
        read_tokenizer(base)
    assert caught.value.violations[0].value == name


def test_a_template_inside_a_broken_config_is_named(tmp_path: Path) -> None:
    base = tiny.write_base(tmp_path / "base")
    (base / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    with pytest.raises(InvalidRequest, match="the chat template cannot be read"):
        read_tokenizer(base)

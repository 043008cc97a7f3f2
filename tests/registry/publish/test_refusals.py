"""Malformed adapters against a served registry, through the command: the right field, exit code 3,
and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from loraplex.cli.registry import make_parser
from loraplex.cli.running import main_of
from tests.adapter_format.builders import Adapter, Tensor, tensor_file, with_header
from tests.adapter_format.test_malformed_config import WRONG
from tests.adapter_format.test_malformed_tensors import (
    A0,
    BROKEN,
    FILE,
    LIES,
    MISPLACED,
    two_tensors,
)
from tests.registry.conftest import ServedRegistry
from tests.registry.house import CONFIG, TENSORS, write_folder

MIN_CASES = 240
Case = tuple[str, Mapping[str, bytes], str]
"""(what is wrong, files by name, field that must be named)."""


def _bad_configs() -> Iterator[Case]:
    for index, (field, value) in enumerate(WRONG):
        adapter = Adapter().with_config(**{field.split(".")[0]: value})
        files = {CONFIG: adapter.config, TENSORS: adapter.tensors}
        yield f"config-{index}-{field}", files, f"{CONFIG}:{field}"
    good = Adapter()
    raw = {
        "empty": b"",
        "list": b"[]",
        "null": b"null",
        "utf16": good.config.decode().encode("utf-16"),
        "nan": good.config.replace(b": 16,", b": NaN,", 1),
        "infinite": good.config.replace(b": 16,", b": 1e999,", 1),
        "twice": b'{"r": 4, ' + good.config[1:],
        "deep": good.config[:-1] + b', "x": ' + b"[" * 9999 + b"]" * 9999 + b"}",
        "cut": good.config[:-20],
        "huge": good.config[:-1] + b', "x": "' + b"x" * (2 << 20) + b'"}',
    }
    for kind, config in raw.items():
        yield f"json-{kind}", {CONFIG: config, TENSORS: good.tensors}, CONFIG


def _bad_tensors() -> Iterator[Case]:
    config = Adapter().config
    for kind, (change, tensor, _) in LIES.items():
        header, body = two_tensors()
        change(header)
        field = f"{FILE}:{tensor}" if tensor or kind == "name-empty" else FILE
        data = with_header(json.dumps(header).encode(), body)
        yield f"lie-{kind}", {CONFIG: config, TENSORS: data}, field
    for kind, (data, _) in BROKEN.items():
        yield f"broken-{kind}", {CONFIG: config, TENSORS: data}, FILE
    for kind, (changes, tensor, _) in MISPLACED.items():
        files = {CONFIG: config, TENSORS: Adapter().with_tensors(changes).tensors}
        yield f"misplaced-{kind}", files, f"{FILE}:{tensor}"
    for number in ("nan", "inf", "-inf"):
        fill = struct.pack("<f", float(number))
        data = Adapter().with_tensors({A0: Tensor("F32", (4, 8), fill)}).tensors
        yield f"value{number}", {CONFIG: config, TENSORS: data}, f"{FILE}:{A0}"


def _bad_files() -> Iterator[Case]:
    good = {CONFIG: Adapter().config, TENSORS: Adapter().tensors}
    strangers = ["adapter_model.bin", "a.pkl", "a.joblib", "lib.so", "b.pickle",
                 "model.ckpt", "run.py", ".env", "\u043a\u043b\u044e\u0447.pem", "adapter.zip",
                 "weights.tar.gz", "model.safetensors", "ADAPTER_CONFIG.JSON"]  # fmt: skip
    for name in strangers:
        yield f"file-{name}", {**good, name: b"x"}, name
    yield "file-no-config", {TENSORS: good[TENSORS]}, CONFIG
    yield "file-no-tensors", {CONFIG: good[CONFIG]}, TENSORS
    yield "file-empty-readme", {**good, "README.md": b""}, "README.md"
    yield "file-only-pickle", {CONFIG: good[CONFIG], "adapter_model.bin": b"x"}, "adapter_model.bin"
    empty = tensor_file({}, {"format": "pt"})
    yield "no-tensor", {CONFIG: good[CONFIG], TENSORS: empty}, FILE


def _refusal(folder: Path, address: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and violations of an upload by the command, in this process."""
    argv = [
        "upload",
        str(folder),
        "--name",
        "bad",
        "--tag",
        "prod",
        "--registry",
        address,
        "--json",
    ]
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        code = main_of(make_parser(), argv)
    last = stderr.getvalue().splitlines()[-1]  # other threads of the tests may write before it
    violations: list[dict[str, Any]] = json.loads(last)["error"]["violations"]
    return code, violations


async def test_every_malformed_adapter_exits_3_naming_the_field_and_leaves_nothing(
    served: ServedRegistry, tmp_path: Path
) -> None:
    cases = [*_bad_configs(), *_bad_tensors(), *_bad_files()]
    assert len(cases) >= MIN_CASES
    before = [info.key async for info in served.registry.store.list_objects("")]
    for number, (kind, files, field) in enumerate(cases):
        folder = write_folder(tmp_path / str(number), files)
        code, violations = await asyncio.to_thread(_refusal, folder, served.address)
        assert code == 3, (kind, code, violations)
        assert field in {violation["field"] for violation in violations}, (kind, violations)
        assert all(violation["description"] for violation in violations)
    after = [info.key async for info in served.registry.store.list_objects("")]
    assert [key for key in after if not key.startswith("uploads/")] == before
    assert [key for key in after if "/parts/" in key] == [], "refused bytes are not kept"
    assert [version async for version in served.client.list(all_versions=True)] == []


async def test_links_and_devices_are_refused_on_the_way_in(
    served: ServedRegistry, tmp_path: Path
) -> None:
    good = {CONFIG: Adapter().config, TENSORS: Adapter().tensors}
    for kind in ("link-out", "dangling", "fifo", "folder"):
        folder = write_folder(tmp_path / kind, {TENSORS: good[TENSORS]})
        path = folder / CONFIG
        if kind == "link-out":
            (tmp_path / "elsewhere.json").write_bytes(good[CONFIG])
            path.symlink_to(tmp_path / "elsewhere.json")
        elif kind == "dangling":
            path.symlink_to(tmp_path / "nowhere")
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.mkdir()
        code, violations = await asyncio.to_thread(_refusal, folder, served.address)
        assert (code, violations[0]["field"]) == (3, CONFIG), kind

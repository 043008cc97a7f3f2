"""Large headers and costly configs are validated in processes of their own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from loraplex.adapter_format import File, Header, Report
from loraplex.adapter_format.safetensors_header import MAX_TENSORS
from loraplex.errors import InvalidAdapter
from loraplex_services.common.limits import VALIDATIONS
from loraplex_services.registry.publish.validation import SMALL_BYTES, Validations
from loraplex_services.registry.publish.validation_process import ValidationJob
from tests.adapter_format.builders import good_config, good_tensors, tensor_file, tiny_geometry

pytestmark = pytest.mark.hostile


@pytest.fixture
async def validations() -> AsyncIterator[Validations]:
    made = Validations()
    yield made
    await made.close()


def job(header: bytes, *, size: int | None = None) -> ValidationJob:
    """Its config is long enough for a process."""
    config = json.dumps(good_config()).encode() + b" " * SMALL_BYTES
    return ValidationJob(config, header, size or len(header), (), tiny_geometry(), 256, False)


def crowded(num_tensors: int = MAX_TENSORS - 1) -> ValidationJob:
    """A header that takes seconds, and is for no module of the base."""
    tensors = {
        f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_A.weight": {
            "dtype": "F32", "shape": [1, 1], "data_offsets": [4 * n, 4 * n + 4],
        }
        for n in range(num_tensors)
    }  # fmt: skip
    head = json.dumps(tensors).encode()
    prefix = len(head).to_bytes(8, "little") + head
    return job(prefix, size=len(prefix) + 4 * num_tensors)


async def test_a_process_finds_what_the_function_finds(validations: Validations) -> None:
    good = job(tensor_file(good_tensors(), {"format": "pt"}))
    assert await validations.check("acme", good) == good.run()
    bad = crowded(1500)
    with pytest.raises(InvalidAdapter) as alone:
        bad.run()
    with pytest.raises(InvalidAdapter) as caught:
        await validations.check("acme", bad)
    assert caught.value.violations == tuple(alone.value.violations)


async def test_what_is_valid_is_validated_once_for_a_config_and_header(
    validations: Validations, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, header = json.dumps(good_config()).encode(), tensor_file(good_tensors(), {})
    names = {"adapter_config.json": len(config), "adapter_model.safetensors": len(header)}
    files = tuple(File(name, size, 64 * "0") for name, size in names.items())
    good = replace(job(header), config_bytes=config, files=files)
    report, _ = await validations.check("acme", good)
    monkeypatch.setattr(ValidationJob, "run", None)
    others = tuple(replace(file, sha256=64 * "1") for file in files)
    assert (await validations.check("globex", replace(good, files=others)))[0] is report
    for other in (
        replace(good, config_bytes=good.config_bytes + b" "),
        replace(good, header_bytes=good.header_bytes + b" "),
        replace(good, max_rank=128),
        replace(good, strict=True),
        replace(good, files=(*files, File("README.md", 1, 64 * "0"))),
        replace(good, geometry=replace(good.geometry)),
    ):
        with pytest.raises(TypeError):
            await validations.check("acme", other)


async def test_large_headers_of_one_tenant_do_not_delay_the_validations_of_another(
    validations: Validations,
) -> None:
    good = job(tensor_file(good_tensors(), {"format": "pt"}))
    await validations.check("acme", good)
    slow = [asyncio.create_task(validations.check("globex", crowded())) for _ in range(4)]
    await asyncio.sleep(0)
    for _ in range(3):
        await validations.check("acme", good)
    assert sum(task.done() for task in slow) < len(slow)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ".*(q_proj|v_proj)"},
        {"exclude_modules": ".*visual.*"},
        {"rank_pattern": {"(?=.*)no_proj": 8}},
        {"alpha_pattern": {"(?=.*)no_proj": 8}},
        {"rank_pattern": {f"q{n:04}": 8 for n in range(500)}},
    ],
    ids=["targets", "excluded", "ranks", "alphas", "many"],
)
async def test_configs_that_are_costly_to_match_do_not_run_in_the_registrys_own_process(
    validations: Validations, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]
) -> None:
    header = tensor_file(good_tensors(), {"format": "pt"})
    config = json.dumps(good_config() | fields).encode()
    costly = replace(job(header), config_bytes=config)
    expected = costly.run()
    monkeypatch.setattr(ValidationJob, "run", None)
    assert await validations.check("globex", costly) == expected
    with pytest.raises(TypeError):  # a quick one does
        await validations.check("globex", replace(costly, config_bytes=config_of_names()))


def config_of_names() -> bytes:
    return json.dumps(good_config() | {"target_modules": ["q_proj", "v_proj"]}).encode()


async def test_quick_validations_of_one_tenant_leave_a_thread_to_another(
    validations: Validations, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = replace(job(tensor_file(good_tensors(), {})), config_bytes=config_of_names())
    expected, may_end, globex = quick.run(), threading.Event(), 64

    def run(asked: ValidationJob) -> tuple[Report, Header]:
        if asked.max_rank == globex:
            may_end.wait(10)
        return expected

    monkeypatch.setattr(ValidationJob, "run", run)
    others = [
        asyncio.create_task(
            validations.check("globex", replace(quick, max_rank=globex, base_names=(str(n),)))
        )
        for n in range(3)
    ]
    await asyncio.sleep(0)
    assert await validations.check("acme", quick) == expected
    assert not any(task.done() for task in others)
    may_end.set()
    await asyncio.gather(*others)


async def test_a_header_that_takes_too_long_is_refused() -> None:
    validations = Validations(replace(VALIDATIONS, timeout_s=0.05))
    try:
        with pytest.raises(InvalidAdapter, match=r"takes longer than 0\.05 s"):
            await validations.check("globex", crowded())
    finally:
        await validations.close()

"""Converts adapters of other PEFT methods, such as LoHa, LoKr, MiSS and VeRA, to LoRA.

PEFT does the conversion, in a separate process (see `other_methods_process`), because it has to
build the base with the adapter on it. The process also measures the error: whatever the method, the
difference of a layer's outputs with and without the adapter is the original update.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from loraplex.adapter_format import CONFIG_FILE, TENSOR_FILE, Report, geometry_from_folder
from loraplex.adapter_format.config import MAX_CONFIG_BYTES
from loraplex.adapter_format.config_fields import WITHOUT_LORA
from loraplex.adapter_format.conversion_field import conversion
from loraplex.adapter_format.folder import file_names
from loraplex.adapter_format.strict_json import read_object
from loraplex.errors import InvalidAdapter, InvalidRequest, Unsupported
from loraplex.rewriting import child
from loraplex.rewriting.merging import scaled_by_one
from loraplex.rewriting.tensors import (
    check_folder,
    copy_files,
    new_folder,
    read_tensors,
    write_files,
)

MAX_RANK = 256
"""The largest rank that a registry accepts by default."""
_NEEDED = ("torch", "transformers", "peft")


@dataclass(frozen=True, slots=True)
class Converted:
    """A LoRA that was converted from another method."""

    report: Report
    method: str
    """PEFT's name of the method, such as `LOHA`."""
    relative_error: float
    """Largest relative error of a module's weights: |LoRA - original| / |original|, Frobenius
    norms."""


def is_other_method(folder: Path) -> bool:
    """Whether a folder's config names a PEFT method other than LoRA."""
    config = folder / CONFIG_FILE
    return config.is_file() and _config(config).get("peft_type") not in (None, "LORA")


def named_base(folder: Path) -> str:
    """The base that an adapter names; "" = none."""
    return str(_config(folder / CONFIG_FILE).get("base_model_name_or_path") or "")


def to_lora(
    folder: Path, out: Path, base: Path, max_rank: int = MAX_RANK, dtype: str = ""
) -> Converted:
    """Convert an adapter of another method to LoRA. No module gets a larger rank than it needs.

    Args:
        out: new, or an empty folder.
        base: folder of the base.
        max_rank: largest rank of a module. A module that needs more gets the best approximation of
            this rank.
        dtype: F16, BF16 or F32; "" = F32.

    Raises:
        InvalidRequest: the folder holds no such adapter.
        InvalidAdapter: PEFT cannot convert it, or it does not fit the base.
        Unsupported: torch, transformers or PEFT is not installed.
        LoraplexError: the process that converts it ended without an answer.
    """
    if not is_other_method(folder):
        description = "holds no adapter of a PEFT method other than LoRA; there is nothing to do"
        raise InvalidRequest.field("DIR", str(folder), description)
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise Unsupported(f"this needs the {missing[0]!r} package: pip install {missing[0]}")
    names = [name for name in file_names(folder) if name not in (CONFIG_FILE, TENSOR_FILE)]
    config = _config(folder / CONFIG_FILE)
    method = str(config["peft_type"])
    if (why := WITHOUT_LORA.get(method)) is not None:
        raise InvalidAdapter.field(f"{CONFIG_FILE}:peft_type", method, why)
    with new_folder(out) as partial:
        found = _run(folder, base, partial / TENSOR_FILE, max_rank)
        copy_files(folder, partial, names)
        ranks, error = found["ranks"], found["relative_error"]
        written = {
            "peft_type": "LORA",
            "task_type": config.get("task_type"),
            "base_model_name_or_path": config.get("base_model_name_or_path"),
            "target_modules": sorted(ranks),
            **scaled_by_one(ranks),
            "lora_bias": found["lora_bias"],
            **conversion(method, relative_error=error),
        }
        write_files(partial, written, read_tensors(partial / TENSOR_FILE), dtype or "F32")
        report = check_folder(partial, geometry_from_folder(base))
        return Converted(report, method, error)


def _config(path: Path) -> dict[str, object]:
    return read_object(path.read_bytes(), CONFIG_FILE, MAX_CONFIG_BYTES)


def _run(folder: Path, base: Path, target: Path, max_rank: int) -> dict[str, Any]:
    """Run the process that does the conversion and writes `target`; returns what it printed."""
    arguments = [str(folder), str(base), str(target), str(max_rank)]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    printed = child.run("other_methods_process", arguments, environ, "converts with PEFT")
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result

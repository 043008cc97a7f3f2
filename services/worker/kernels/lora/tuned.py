"""Plans found by measuring: `tuned/sm_<capability>.json`, kept where somebody has measured.

`benchmarks/gpu/gpu_lora_ops.py --tune` writes such a file beside its results; put it into `tuned/`
to have workers on that GPU use it. Without one the table of `plan.py` holds. None is here yet.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from services.worker.kernels.lora.plan import (
    PLANS_FLOAT32,
    PLANS_HALF,
    LoraPlan,
    Tiling,
    family_of,
)

FOLDER = Path(__file__).parent / "tuned"


def tuned_plan(max_run_rows: int, num_rows: int, itemsize: int, device: torch.device) -> LoraPlan:
    """The plan of a step on a device; see `plan.family_of`."""
    folder = FOLDER if device.type == "cuda" else None
    half, single = _plans(folder, capability_of(device))
    return (single if itemsize == 4 else half)[family_of(max_run_rows, num_rows)]


def capability_of(device: torch.device) -> int:
    """As 90 for sm_90; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def _plans(folder: Path | None, capability: int) -> tuple[Mapping[str, LoraPlan], ...]:
    """For half precision and for float32, by family."""
    if folder is None:
        return PLANS_HALF, PLANS_FLOAT32
    return read_plans(folder / f"sm_{capability}.json")


def read_plans(path: Path) -> tuple[Mapping[str, LoraPlan], ...]:
    """The plans of a file over those of `plan.py`, which stand where it names no other."""
    found = json.loads(path.read_text()) if path.exists() else {}
    half = {family: _plan(words) for family, words in found.get("half", {}).items()}
    single = {family: _plan(words) for family, words in found.get("float32", {}).items()}
    return {**PLANS_HALF, **half}, {**PLANS_FLOAT32, **single}


def write_plans(path: Path, half: Mapping[str, LoraPlan]) -> None:
    """The file of a device's best plans for half precision."""
    path.parent.mkdir(parents=True, exist_ok=True)
    words = {"half": {family: asdict(plan) for family, plan in half.items()}}
    path.write_text(json.dumps(words, indent=2) + "\n")


def _plan(words: Mapping[str, Any]) -> LoraPlan:
    tilings = {name: Tiling(**words[name]) for name in ("short", "long")}
    return LoraPlan(**{**words, **tilings})

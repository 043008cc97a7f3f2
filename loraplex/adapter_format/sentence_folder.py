"""Folders of sentence-transformers: checks that the pooling that they describe is the one that is
served.

They keep it in `modules.json` and `1_Pooling/config.json`; ours are the fields `pooling` and
`normalize` of adapter_config.json, which belong to the adapter's identity. Nothing is copied
silently: where the two differ, the refusal spells the fields out.
"""

from __future__ import annotations

import json
from pathlib import Path

from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.pooling_fields import LAST, MEAN
from loraplex.adapter_format.strict_json import read_object
from loraplex.errors import InvalidAdapter

MODULES_FILE = "modules.json"
POOLING_FILE = "1_Pooling/config.json"
_MAX_BYTES = 64 * 1024
_MODES = {
    "pooling_mode_lasttoken": LAST,
    "lasttoken": LAST,
    "pooling_mode_mean_tokens": MEAN,
    "mean": MEAN,
}
_SERVED_STEPS = ("Transformer", "Pooling", "Normalize")


def check_pooling(folder: Path, config_bytes: bytes, findings: Findings) -> None:
    """Refuse an adapter whose pipeline gives other vectors than `Embed` would.

    Args:
        config_bytes: adapter_config.json; anything else is left to others to refuse.
    """
    pooling_path, modules_path = folder / POOLING_FILE, folder / MODULES_FILE
    if not pooling_path.is_file():
        return
    try:
        mode = _mode(read_object(_read(pooling_path), POOLING_FILE, _MAX_BYTES), findings)
        fields = read_object(config_bytes, "adapter_config.json", 1024 * 1024)
    except InvalidAdapter:
        return
    steps = _steps(_read(modules_path), findings) if modules_path.is_file() else None
    wanted: dict[str, object] = {} if mode is None else {"pooling": mode}
    if steps is not None:
        wanted["normalize"] = "Normalize" in steps
    ours = {"pooling": fields.get("pooling") or LAST, "normalize": fields.get("normalize")}
    ours["normalize"] = True if ours["normalize"] is None else ours["normalize"]
    if any(ours[name] != value for name, value in wanted.items()):
        spelled = json.dumps(wanted)[1:-1]
        findings.refuse(
            POOLING_FILE, spelled, f"is not what adapter_config.json says; add {spelled} to it"
        )


def _mode(pooling: dict[str, object], findings: Findings) -> str | None:
    """The one served mode that is on; None after a refusal."""
    modes = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value]
    if isinstance(pooling.get("pooling_mode"), str):
        modes = [str(pooling["pooling_mode"])]
    served = [_MODES[mode] for mode in modes if mode in _MODES]
    if len(modes) != 1 or not served:
        description = "is not served; train the embedding with last-token or mean pooling"
        findings.refuse(f"{POOLING_FILE}:pooling_mode", modes, description)
        return None
    if pooling.get("include_prompt") is False:
        description = "is not served: vectors take the whole text; train with include_prompt true"
        findings.refuse(f"{POOLING_FILE}:include_prompt", False, description)
    return served[0]


def _steps(raw: bytes, findings: Findings) -> list[str] | None:
    """Class names of a pipeline's modules; None after a refusal."""
    try:
        listed = json.loads(raw)
        names = [str(entry["type"]).rpartition(".")[2] for entry in listed]
    except (ValueError, TypeError, KeyError, RecursionError):
        findings.refuse(MODULES_FILE, "...", "is damaged; save the model again, or remove the file")
        return None
    odd = [name for name in names if name not in _SERVED_STEPS]
    for name in odd:
        description = f"is not served; only {', '.join(_SERVED_STEPS)} are"
        findings.refuse(f"{MODULES_FILE}:type", name, description)
    return None if odd else names


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_BYTES + 1)

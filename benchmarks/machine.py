"""The machine under a benchmark, and where its numbers are written."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or Path(__file__).parent / "results")
"""Where results are written: the published ones, unless the environment names another folder."""
SIMULATED = "simulated"
"""Folder of results that do not depend on the machine."""

_ISA = ("amx_tile", "avx512_bf16", "avx512f", "avx2", "sha_ni", "asimd", "bf16", "sha2")


def options_of(doc: str | None) -> ArgumentParser:
    """A parser of a benchmark's options, described by the first line of its docstring."""
    return ArgumentParser(description=(doc or "").partition("\n")[0], allow_abbrev=False)


def cpu_facts() -> dict[str, Any]:
    """Facts that a reader needs to compare numbers, none of which identifies this machine."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""

    def field(name: str) -> str:
        found = re.search(rf"^(?:{name})\s*:\s*(.+)$", text, re.MULTILINE)
        return found[1] if found else ""

    flags = set(field("flags|Features").split())
    return {
        "cpu": field("model name") or platform.processor(),
        "family": field("cpu family"),
        "model": field("model"),
        "architecture": platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "isa": [name for name in _ISA if name in flags],
        "system": platform.system(),
        "python": platform.python_version(),
    }


def machine_kind(facts: dict[str, Any]) -> str:
    """A folder name that machines of one kind share, such as `amd-epyc-zen-5-2c`."""
    model = re.sub(r"\(.*?\)|@.*|\bcpu\b|\bprocessor\b", " ", str(facts["cpu"]).lower())
    words = re.findall(r"[a-z0-9]+", model) or [str(facts["architecture"])]
    return "-".join([*words[:5], *zen_generation(facts), f"{facts['num_cores']}c"])


def zen_generation(facts: dict[str, Any]) -> list[str]:
    """The generation of an AMD processor since Zen 3, because virtual machines say "AMD EPYC"
    without a number. Zen 3 and Zen 4 share a family."""
    if "AMD" not in facts["cpu"] or facts["family"] not in ("25", "26"):
        return []
    if facts["family"] == "26":
        return ["zen", "5"]
    return ["zen", "4" if int(facts["model"]) // 16 in (1, 6, 7, 10) else "3"]


def write_results(name: str, results: dict[str, Any], args: Namespace | None = None) -> Path:
    """Write `results/<machine kind>/<name>.json`, and print and return its path. Results that say
    that they are simulated are the same on all machines and go to `results/simulated`.

    Args:
        args: the options of the run, which are written except for folders.
    """
    facts = cpu_facts()
    document: dict[str, Any] = {"measured_on": datetime.now(UTC).date().isoformat()}
    document["machine"] = facts
    if not results.get("simulated"):
        document["load_average_at_end"] = os.getloadavg()
    if args is not None:
        options = vars(args).items()
        document["options"] = {key: val for key, val in options if not isinstance(val, Path)}
    folder = SIMULATED if results.get("simulated") else machine_kind(facts)
    path = RESULTS / folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(rounded(document | results), indent=2, allow_nan=False)
    path.write_text(text + "\n")
    print(f"wrote {path}", flush=True)
    return path


def rounded(value: Any) -> Any:
    """The same document with dataclasses as objects, and floats rounded to six significant digits.
    JSON has no infinity and no NaN: they become null."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def read_results(name: str) -> dict[str, Any]:
    """The results that `write_results` wrote on a machine of this kind."""
    path = RESULTS / machine_kind(cpu_facts()) / f"{name}.json"
    results: dict[str, Any] = json.loads(path.read_text())
    return results

"""Draw a `cpu_decode.json` as a PNG in the same folder.

    python -m benchmarks run cpu.plot FILE

Needs the extra `plots`: `pip install 'loraplex[plots]'`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Steps over the floor, and speed over the peer, by case."""
    from matplotlib import pyplot

    path = Path(sys.argv[1])
    results: dict[str, Any] = json.loads(path.read_text())
    rows = results["table"]
    figure, (steps, speeds) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    cases = [row["case"] for row in rows]
    steps.bar(cases, [row["step_over_floor"] for row in rows])
    steps.axhline(1.0, color="black", linewidth=0.8)
    steps.set_title("decode step over its floor (bytes or arithmetic)")
    compared = [row for row in rows if "speed_over_peft" in row]
    speeds.bar([row["case"] for row in compared], [row["speed_over_peft"] for row in compared])
    speeds.axhline(1.0, color="black", linewidth=0.8)
    speeds.set_title("end to end, times transformers + peft")
    for axes in (steps, speeds):
        axes.set_xlabel("requests x distinct adapters")
        axes.margins(y=0.12)
        axes.bar_label(axes.containers[0], fmt="%.1f")
    machine = results["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['num_cores']} cores, {results['isa']}")
    figure.savefig(path.with_suffix(".png"), dpi=110)
    print(path.with_suffix(".png"))


if __name__ == "__main__":
    main()

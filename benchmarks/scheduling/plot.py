"""Draw the results of the adapter benchmarks, measured and simulated, as two PNG files.

    python -m benchmarks run scheduling.plot FOLDER

FOLDER is a machine's, such as benchmarks/results/intel-xeon-2c. Needs the extra `plots`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Two pictures: what was measured, what was simulated."""
    from matplotlib import pyplot

    folder = Path(sys.argv[1])
    panels = {
        "adapters_measured": (draw_counts, draw_first_token, draw_plan, draw_agreement),
        "adapters_simulated": (draw_pool, draw_abort, draw_clustering, draw_eviction),
    }
    for name, draws in panels.items():
        figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
        for one, draw in zip(axes.flat, draws, strict=True):
            draw(one, folder)
            one.margins(y=0.15)
            one.title.set_fontsize(10)
            one.tick_params(labelsize=7)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=90)
        print(path)


def read(folder: Path, name: str) -> dict[str, Any]:
    """One result."""
    results: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return results


def bars(axes: Any, groups: list[str], series: dict[str, list[float]]) -> None:
    """Groups of bars side by side, with their numbers."""
    width = 0.8 / len(series)
    for series_index, (name, values) in enumerate(series.items()):
        at = [index + (series_index + 0.5) * width - 0.4 for index in range(len(groups))]
        drawn = axes.bar(at, values, width, label=name)
        axes.bar_label(drawn, fmt="%.2f", fontsize=5 if len(groups) * len(series) > 20 else 7)
    axes.set_xticks(range(len(groups)), groups)
    if len(series) > 1:
        axes.legend(fontsize=6)


def draw_counts(axes: Any, folder: Path) -> None:
    """Throughput by number of adapters."""
    rows = read(folder, "many_adapters")["counts"]
    counts = [str(row["num_adapters"]) for row in rows]
    measured = [row["over_base"] for row in rows]
    predicted = [row["predicted"] for row in rows]
    bars(axes, counts, {"measured": measured, "predicted from bytes": predicted})
    axes.set_title("throughput over n = 0, by adapters n (22M base)")


def draw_first_token(axes: Any, folder: Path) -> None:
    """Hit and miss."""
    first = read(folder, "many_adapters")["first_token"]
    bars(axes, ["resident", "on disk"], {"": [first["hit_ms"], first["miss_ms"]]})
    axes.set_title("median first token (ms), 2x oversubscribed, alongside 8 that decode")


def draw_plan(axes: Any, folder: Path) -> None:
    """Planning's share."""
    rows = [row for row in read(folder, "plan_cost")["rows"] if row["policy"] == "fair"]
    series = {
        f"{num} end in a step": [100 * r["share_of_step"] for r in rows if r["num_ending"] == num]
        for num in dict.fromkeys(row["num_ending"] for row in rows)
    }
    bars(axes, [str(num) for num in dict.fromkeys(row["num_waiting"] for row in rows)], series)
    axes.axhline(2.0, color="black", linewidth=0.8)
    axes.set_title("planning, % of a step of 256 rows, by requests waiting")


def draw_agreement(axes: Any, folder: Path) -> None:
    """Simulated over measured."""
    runs = read(folder, "simulated_and_measured")["runs"]
    runs = [run for run in runs if run["run"].replace(".", "").isdigit()]
    names = list(runs[0]["ratios"])
    series = {f"{run['run']} requests/s": list(run["ratios"].values()) for run in runs}
    bars(axes, [name.replace(" ", "\n") for name in names], series)
    axes.set_ylim(0, 1.8)
    axes.axhspan(0.85, 1.15, color="grey", alpha=0.2)
    axes.set_title("simulated over measured, through a whole stack")


def draw_pool(axes: Any, folder: Path) -> None:
    """One pool compared with splits."""
    runs = read(folder, "unified_pool_64_192")["runs"]
    names = [run["memory"].replace(" for adapters", "").replace(", as ", "\n") for run in runs]
    bars(axes, names, {"": [run["attained_per_s"] for run in runs]})
    axes.set_title("first tokens in time per second, drifting load: pool and splits")


def draw_abort(axes: Any, folder: Path) -> None:
    """Early abort compared with first come, first served."""
    runs = [run for run in read(folder, "early_abort")["runs"] if run["cv"] == 1]
    series = {
        label: [run[key] for run in runs]
        for label, key in (
            ("early abort", "early_abort"),
            ("FCFS", "fcfs"),
            ("knows all arrivals", "bound"),
        )
    }
    bars(axes, [f"{run['load']:g}" for run in runs], series)
    axes.set_title("first tokens within 6 s, by load over capacity (cv 1)")


def draw_clustering(axes: Any, folder: Path) -> None:
    """Attainment by d."""
    runs = read(folder, "clustering")["runs"]
    settings = list(dict.fromkeys((run["min_queue"], run["rate_share"]) for run in runs))
    distinct = list(dict.fromkeys(run["distinct"] for run in runs))
    series = {
        f"queue bound {bound:g}, load {share:g}": [
            run["attainment"]
            for run in runs
            if (run["min_queue"], run["rate_share"]) == (bound, share)
        ]
        for bound, share in settings
    }
    bars(axes, [f"d={d}" if d < 32 else "off" for d in distinct], series)
    axes.set_ylim(0, 1.5)
    axes.set_title("clustering: first tokens within 6 s, 32 adapters")


def draw_eviction(axes: Any, folder: Path) -> None:
    """Copies over those of least recently used."""
    runs = read(folder, "eviction")["runs"]
    traces = list(dict.fromkeys(run["trace"] for run in runs))
    orders = list(dict.fromkeys(run["order"] for run in runs))
    series = {
        order: [run["copies_over_lru"] for run in runs if run["order"] == order] for order in orders
    }
    bars(axes, [trace.replace(" ", "\n", 2) for trace in traces], series)
    axes.set_ylim(0.6, 1.3)
    axes.set_title("seconds of copies over least recently used")


if __name__ == "__main__":
    main()

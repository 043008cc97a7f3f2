"""Draw the comparisons with the S-LoRA paper from stored results, as one PNG file.

    python -m benchmarks run scheduling.plot_slora

Reads the results of `scheduling.sweep`, `clustering` and `tensor_parallel`, and of
`serving.baselines`, in `benchmarks/results/`, and writes `docs/images/slora.png`. Dashed lines are
the paper's numbers, on its GPUs. Needs the extra `plots`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "results"
EPYC, SIMULATED = RESULTS / "amd-epyc-zen-5-2c", RESULTS / "simulated"
PATH = Path(__file__).parent.parent.parent / "docs" / "images" / "slora.png"

PAPER_N = ((5, 100, 1000, 2000), (7.48, 7.29, 6.69, 6.73))
"""Table 3, S2 on an A100 of 80 GB at R = 10: requests/s."""
PAPER_RATE = ((1, 2, 4, 6, 8), (1, 1, 1, 0.10, 0.06))
"""Figure 6, S4, n = 400, on an A100 of 80 GB: attainment."""
PAPER_ARENA = ((1, 2, 3, 4), (1, 1, 0.90, 0.46))
"""Figure 7, S2 on an A10G: attainment."""
PAPER_MERGED = ((1, 2, 5), (1.13, 0.80, 0.51))
"""Figure 9, on an A10G at R = 2: throughput of merged weights over that of updates on the fly."""
PAPER_CV = {"abort": (0.858, 0.636), "lcfs": (0.790, 0.500), "fcfs": (0.270, 0.315)}
"""Figure 10, S2 on an A10G at R = 2, cv = 1 and 8: attainment."""
PAPER_CLUSTERS = ((1, 8, 32), (0.846, 0.850, 0.679))
"""Table 4, S2 on an A100 at R = 2: first tokens in time."""
SIDES = ("abort", "lcfs", "fcfs")


def runs(folder: Path, name: str) -> list[dict[str, Any]]:
    """The runs of one result."""
    found: list[dict[str, Any]] = json.loads((folder / f"{name}.json").read_text())["runs"]
    return found


def lines(axes: Any, name: str, x: str, y: str, sides: Sequence[str]) -> None:
    """One line for each side of a sweep."""
    for side in sides:
        points = [(run[x], run[y]) for run in runs(SIMULATED, name) if run["side"] == side]
        axes.plot(*zip(*points, strict=True), marker="o", label=side)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def paper(axes: Any, points: tuple[Sequence[float], Sequence[float]], label: str) -> None:
    """Numbers of the paper."""
    axes.plot(*points, linestyle="--", marker="x", color="gray", label=label)


def draw_adapters(axes: Any) -> None:
    """Figure 5 and Table 3."""
    lines(axes, "sweep_n", "num_adapters", "requests_per_s", ("abort", "fcfs"))
    paper(axes, PAPER_N, "paper (A100, R = 10)")
    axes.set_xscale("log")
    axes.set_title("Table 3, Figure 5: number of adapters (simulated, R = 2)")


def draw_rate(axes: Any) -> None:
    """Figure 6."""
    lines(axes, "sweep_rate", "rate_per_s", "attainment", ("abort", "fcfs"))
    paper(axes, PAPER_RATE, "paper (S4, A100)")
    axes.set_title("Figure 6: request rate (simulated, S2)")


def draw_arena(axes: Any) -> None:
    """Figure 7."""
    lines(axes, "sweep_rate_arena", "rate_per_s", "attainment", ("abort", "fcfs"))
    paper(axes, PAPER_ARENA, "paper (A10G)")
    axes.set_title("Figure 7: Chatbot Arena (simulated, generated trace)")


def draw_ranks(axes: Any) -> None:
    """Figure 8."""
    found = runs(SIMULATED, "tensor_parallel_simulated")
    names = list(found[0]["tokens_per_s"])
    for index, name in enumerate(names):
        at = [group + (index - 1.5) * 0.2 for group in range(len(found))]
        axes.bar(at, [run["tokens_per_s"][name] for run in found], 0.2, label=name)
    labels = [f"{run['case'].replace(', ', chr(10))}\n{run['num_gpus']} GPUs" for run in found]
    axes.set_xticks(range(len(found)), labels)
    axes.set_ylabel("tokens_per_s")
    axes.set_title("Figure 8: tensor parallelism (simulated)")


def draw_merged(axes: Any) -> None:
    """Figure 9."""
    points = [(r["adapters"], 1 / r["over_loraplex"]["merged"]) for r in runs(EPYC, "baselines")]
    axes.plot(*zip(*points, strict=True), marker="o", label="135M, two EPYC cores")
    paper(axes, PAPER_MERGED, "paper (A10G)")
    axes.set_xlabel("num_adapters")
    axes.set_ylabel("merged over on the fly")
    axes.set_title("Figure 9: merged weights (measured on a CPU)")


def draw_cv(axes: Any) -> None:
    """Figure 10."""
    lines(axes, "sweep_cv", "cv", "attainment", SIDES)
    for side, values in PAPER_CV.items():
        paper(axes, ((1, 8), values), f"paper: {side}")
    axes.set_title("Figure 10: bursts (simulated, 1.35 of the capacity)")


def draw_clusters(axes: Any) -> None:
    """Table 4 and Appendix A."""
    points = sorted(
        (run["cluster_size"], run["attainment"])
        for run in runs(SIMULATED, "clustering")
        if run["rate_share"] == 1.15 and run["cluster_size"]
    )
    axes.plot(*zip(*points, strict=True), marker="o", label="Loraplex")
    paper(axes, PAPER_CLUSTERS, "paper (A100)")
    axes.set_xlabel("cluster_size")
    axes.set_ylabel("attainment")
    axes.set_title("Table 4, Appendix A: clustering (simulated, S2)")


def main() -> None:
    """Write the picture."""
    from matplotlib import pyplot
    from PIL import Image

    figure, axes = pyplot.subplots(4, 2, figsize=(11, 16), layout="constrained")
    draws = (draw_adapters, draw_rate, draw_arena, draw_ranks, draw_merged, draw_cv, draw_clusters)
    axes.flat[-1].remove()
    for one, draw in zip(axes.flat, draws, strict=False):
        draw(one)
        one.set_ylim(bottom=0)
        one.title.set_fontsize(10)
        one.tick_params(labelsize=7)
        one.legend(fontsize=7)
    figure.savefig(PATH, dpi=90)
    with Image.open(PATH) as drawn:  # a third of the bytes
        drawn.convert("RGB").quantize(48).save(PATH, optimize=True)
    print(PATH)


if __name__ == "__main__":
    main()

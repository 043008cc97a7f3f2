"""Geometries, the byte floor, stopwatches and the results folder of the GPU benchmarks."""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.llama import LLAMA_2_7B, LLAMA_2_13B, LLAMA_3_8B, Shape

RESULTS = Path(__file__).parents[1] / "results"
_COPY_BYTES = 1 << 30
TINY = Shape("tiny", 128, 64, 96, 2, 4, 2)
SHAPES = {shape.name: shape for shape in (LLAMA_3_8B, LLAMA_2_7B, LLAMA_2_13B, TINY)}


def options_of(doc: str | None) -> argparse.ArgumentParser:
    """The options of every GPU benchmark, which is described by its docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tiny", action="store_true", help="small sizes: does it run at all")
    return parser


def floor_s(
    shape: Shape,
    batch_size: int,
    context: int,
    num_adapters: int,
    adapter_bytes: int,
    itemsize: int,
    bytes_per_s: float,
) -> float:
    """The time that the bytes of a decode step without its head take at the measured copy
    bandwidth: weights once, keys and values of every sequence, each distinct adapter once."""
    num_bytes = (
        itemsize * shape.num_layer_weights
        + shape.kv_bytes(batch_size * context, itemsize)
        + num_adapters * adapter_bytes
    )
    return num_bytes / bytes_per_s


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(run: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Median seconds of `run`, host included, each waited for."""
    times = []
    for _ in range(repetitions):
        synchronize(device)
        begin_s = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times)


def device_median_s(run: Callable[[], object], repetitions: int) -> float:
    """Median seconds on the GPU, by events around each run."""
    pairs = []
    for _ in range(repetitions):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """`run` as a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def copy_bytes_per_s(device: torch.device, *, is_tiny: bool) -> float:
    """Bytes read and written per second by a copy on the device."""
    num_bytes = _COPY_BYTES >> 10 if is_tiny else _COPY_BYTES
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * num_bytes / median_s(lambda: target.copy_(source), device, 10)


def device_facts(device: torch.device) -> dict[str, Any]:
    """Facts that a reader needs to compare numbers."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
    }


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def write_results(name: str, device: torch.device, results: dict[str, Any], root: Path) -> Path:
    """Write `<root>/<name of the GPU>/<name>.json`; returns its path."""
    facts = device_facts(device)
    kind = "-".join(re.findall(r"[a-z0-9]+", facts["device"].lower()))
    path = root / kind / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": facts, **results}, indent=2) + "\n")
    return path


def print_table(rows: list[dict[str, Any]]) -> None:
    """Markdown, one row each; floats to three places."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        cells = (row.get(column, "") for column in columns)
        text = (f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells)
        print("| " + " | ".join(text) + " |")

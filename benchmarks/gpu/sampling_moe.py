"""Choosing tokens after the layers, and the experts of a mixture, on a GPU.

    python -m benchmarks.gpu.sampling_moe [--device cpu --tiny] [--out DIR]

Choosing tokens, microseconds on the device for a batch: the draw; top_k 50 and top_p 0.95, with the
sorting reference alongside; and the head's product with float32 logits, with the rounded and
widened product alongside. Experts: one layer's grouped products inside a CUDA graph, alongside the
time that the chosen experts' weights take at the measured copy bandwidth. Scores are normal numbers
times 3: a language model's are as wide, but fewer of them are near the best.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.common import (
    captured,
    copy_bytes_per_s,
    device_median_s,
    median_s,
    options_of,
)
from benchmarks.gpu.results import Results
from loraplex_services.worker.layers.grouped_experts import GroupedExperts
from loraplex_services.worker.layers.moe import ExpertWeights, LoopedExperts
from loraplex_services.worker.ops.activation.triton import silu_and_multiply
from loraplex_services.worker.ops.linear.torch import DenseLinear
from loraplex_services.worker.ops.lora.worklist import LoraBatch
from loraplex_services.worker.ops.sampling.triton import draw
from loraplex_services.worker.ops.sampling.truncation import truncate
from loraplex_services.worker.sampling import masks

VOCABULARY, HIDDEN = 128_256, 4096
MIXTURES = {"qwen3-30b-a3b": (128, 8, 2048, 768), "mixtral-8x7b": (8, 2, 4096, 14336)}
"""Experts, active ones, hidden size, intermediate size."""
TINY_MIXTURES = {"tiny": (4, 2, 64, 96)}


@torch.inference_mode()
def main() -> int:
    """Measure, print, write after every row; returns how many tables have an error."""
    args = parse_args()
    device = torch.device(args.device)
    results = Results("sampling_moe", args)
    for name, measure in (("sampling", sampling_rows), ("moe", expert_rows)):
        with results.setting(name):
            for row in measure(device, args.tiny, args.steps):
                results.add(name, row)
    return results.end()


def sampling_rows(device: torch.device, is_tiny: bool, steps: int) -> Iterator[dict[str, Any]]:
    """One row for each batch size."""
    width, hidden = (500, 64) if is_tiny else (VOCABULARY, HIDDEN)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    head = DenseLinear(torch.randn(width, hidden, device=device).to(dtype) / hidden**0.5)
    for num_rows in (1, 2) if is_tiny else (1, 16, 64, 256):
        x = torch.randn(num_rows, hidden, device=device).to(dtype)
        scores = 3 * torch.randn(num_rows, width, device=device)
        keys = torch.randint(1 << 40, (num_rows, 3), device=device)
        times = {
            "draw": partial(draw, scores, keys),
            "float32_head": partial(head.apply_float32, x),
            "widened_head": lambda x=x: head.apply(x).float(),
        }
        for name, limit in (("top_k", (50.0, 1.0, 0.0)), ("top_p", (float(width), 0.95, 0.0))):
            limits = torch.tensor([limit] * num_rows, device=device)
            times[name] = partial(cut, truncate, scores, limits)
            times[f"{name}_sorted"] = partial(cut, masks.truncate, scores, limits)
        times["copy"] = scores.clone
        measured = {f"{name}_us": 1e6 * time_s(run, device, steps) for name, run in times.items()}
        yield {"rows": num_rows, **measured}


def cut(way: Callable[..., None], scores: torch.Tensor, limits: torch.Tensor) -> None:
    """Truncate a copy, whose time is in column `copy_us`."""
    way(scores.clone(), limits)


def expert_rows(device: torch.device, is_tiny: bool, steps: int) -> Iterator[dict[str, Any]]:
    """One row for each mixture and number of tokens."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bytes_per_s = copy_bytes_per_s(device, is_tiny=is_tiny)
    for name, (num, active, hidden, width) in (TINY_MIXTURES if is_tiny else MIXTURES).items():
        gate_up = torch.randn(num, 2 * width, hidden, device=device).to(dtype) / hidden**0.5
        down = torch.randn(num, hidden, width, device=device).to(dtype) / width**0.5
        looped = LoopedExperts((), silu_and_multiply)
        experts = GroupedExperts(ExpertWeights(gate_up, down), active, silu_and_multiply, looped)
        for num_tokens in (1, 3) if is_tiny else (1, 16, 64, 256, 2048):
            x = torch.randn(num_tokens, hidden, device=device).to(dtype)
            probs = torch.rand(num_tokens, num, device=device).softmax(-1)
            weights, chosen = probs.topk(active)
            run = partial(experts.forward, x, chosen, weights, LoraBatch((), {}))
            if device.type == "cuda":
                run = captured(run)
            num_read = len(chosen.unique())
            num_bytes = num_read * 3 * width * hidden * dtype.itemsize
            operations = 6 * num_tokens * active * width * hidden
            seconds = time_s(run, device, steps)
            yield {
                "mixture": name,
                "tokens": num_tokens,
                "experts_read": num_read,
                "us": 1e6 * seconds,
                "bytes_floor_us": 1e6 * num_bytes / bytes_per_s,
                "share_of_floor": num_bytes / bytes_per_s / seconds,
                "tflop_per_s": operations / seconds / 1e12,
            }


def time_s(run: Callable[[], object], device: torch.device, steps: int) -> float:
    """Median seconds, by events on a GPU."""
    run()
    if device.type == "cuda":
        return device_median_s(run, steps)
    return median_s(run, device, steps)


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = options_of(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())

"""Throughput with n adapters, relative to the servers of the S-LoRA paper's comparison, on a CPU.

    python -m benchmarks run serving.baselines --work-dir DIR [--counts 1,2,5,16]

16 requests come at once, for n adapters in turn (ranks 8, 16, 32 and 64 on every linear). The sides
alternate, and the medians of their processor seconds over those of `loraplex` are printed:

- `loraplex`: the engine in process; the adapters are resident,
- `merged`: each adapter is added to the weights, its requests run, and it is taken out again,
- `padded`: updates by batched products of copies of the matrices, padded to the largest rank,
- `packed`: one process with merged weights for each adapter, all at once on the same cores,
- `peft`: a server on transformers and PEFT that loads an adapter from its file, runs its requests
  as one batch, and goes on with the next adapter.

`merged` and `padded` are put together: the requests run on the engine without adapters, whose time
is that of merged weights, and torch's products on matrices of these shapes are timed alone.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.sides import OurEngine, PeftMixed
from benchmarks.cpu_model import (
    RANKS,
    SHAPES,
    Shape,
    base_options,
    make_adapter,
    make_base,
    make_prompts,
    rank_of,
)
from benchmarks.machine import write_results
from loraplex.cli.output import print_table

NUM_REQUESTS = 16
NUM_LAYERS = 4
"""Number of layers on which products are timed, instead of all."""
ARENA_BYTES = 1 << 30
Prompts = list[list[int]]


class Products:
    """torch's products on weights and adapters of one shape."""

    def __init__(self, shape: Shape) -> None:
        self._scale = shape.num_layers / NUM_LAYERS
        self._sites = [sizes for _ in range(NUM_LAYERS) for sizes in shape.linears.values()]
        self._weights = [_zeros(num_out, num_in) for num_in, num_out in self._sites]

    def merge_s(self, rank: int) -> float:
        """Seconds of adding an adapter to the weights of all layers."""
        pairs = [(_zeros(num_out, rank), _zeros(rank, num_in)) for num_in, num_out in self._sites]
        begin_s = time.process_time()
        for weight, (b, a) in zip(self._weights, pairs, strict=True):
            weight.addmm_(b, a)
        return (time.process_time() - begin_s) * self._scale

    def padded_s(self, num_adapters: int) -> float:
        """Seconds of the updates of a decode step of all requests."""
        index = torch.arange(NUM_REQUESTS) % num_adapters
        total_s = 0.0
        for num_in, num_out in self._sites:
            a = _zeros(num_adapters, max(RANKS), num_in)
            b = _zeros(num_adapters, num_out, max(RANKS))
            x, y = _zeros(NUM_REQUESTS, num_in, 1), _zeros(NUM_REQUESTS, num_out, 1)
            begin_s = time.process_time()
            y.baddbmm_(b[index], torch.bmm(a[index], x))
            total_s += time.process_time() - begin_s
        return total_s * self._scale


def fresh(prompts: Prompts, number: int) -> Prompts:
    """Prompts of the same lengths with other beginnings, which no prefix cache holds."""
    return [[prompt[0] - number, *prompt[1:]] for prompt in prompts]


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


class PeftSwapping(PeftMixed):
    """One adapter at a time, from its file."""

    def serve(self, batches: Sequence[tuple[Path, Prompts]], num_tokens: int) -> float:
        """Seconds of all batches."""
        begin_s = time.process_time()
        for number, (folder, prompts) in enumerate(batches):
            self.swap_in(folder, str(number))
            self.run(prompts, 0, num_tokens)
        return time.process_time() - begin_s

    def swap_in(self, folder: Path, name: str) -> None:
        """Replace the adapter that is loaded, whatever its name."""
        from peft import PeftModel

        if isinstance(self._model, PeftModel):
            [before] = self._model.peft_config
            self._model.load_adapter(folder, adapter_name=f"{name} after {before}")
            self._model.set_adapter(f"{name} after {before}")
            self._model.delete_adapter(before)
        else:
            self._model = PeftModel.from_pretrained(self._model, folder, adapter_name=name)
        self._model.eval()


def serve_alone(base: Path, prompts: Prompts, num_tokens: int, barrier: Any, done: Any) -> None:
    """One process of a merged model: warms up, waits for the others, runs."""
    ours = OurEngine(base, "bfloat16", "auto", ARENA_BYTES // 4)
    ours.run(fresh(prompts, 1), 0, 2)
    barrier.wait()
    done.put(ours.run(prompts, 0, num_tokens).cpu_s)


def packed_s(base: Path, batches: Sequence[Prompts], num_tokens: int) -> float:
    """Processor seconds of all processes, from their first request to their last token."""
    context = multiprocessing.get_context("spawn")
    barrier, done = context.Barrier(len(batches)), context.Queue()
    tails = (num_tokens, barrier, done)
    all_args = [(base, prompts, *tails) for prompts in batches]
    processes = [context.Process(target=serve_alone, args=args) for args in all_args]
    for process in processes:
        process.start()
    seconds = [done.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    return float(sum(seconds))


def main() -> None:
    """Print the table and write `results/<machine>/baselines.json`."""
    parser = base_options(__doc__)
    parser.add_argument("--counts", default="1,2,5,16", help="numbers of adapters")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--packed", type=int, default=5, help="most processes at once")
    args = parser.parse_args()
    shape, counts = SHAPES[args.model], [int(text) for text in args.counts.split(",")]
    base = make_base(shape, args.work_dir)
    folders = [make_adapter(shape, args.work_dir, adapter) for adapter in range(max(counts))]
    ours, products = OurEngine(base, "bfloat16", "auto", ARENA_BYTES), Products(shape)
    ours.load(folders)
    peer = PeftSwapping(base, "bfloat16", torch.get_num_threads())
    rows, runs = [], []
    for count in counts:
        ratios: dict[str, list[float]] = {}
        for turn in range(args.rounds):
            prompts = make_prompts(NUM_REQUESTS, shape.vocab_size, 1000 * count + turn)
            batches = [prompts[adapter::count] for adapter in range(count)]
            ours_s = ours.run(prompts, count, args.tokens).cpu_s
            merges_s = sum(products.merge_s(rank_of(adapter)) for adapter in range(count))
            seconds = {
                "merged": 2 * merges_s
                + sum(ours.run(fresh(b, 1), 0, args.tokens).cpu_s for b in batches),
                "padded": ours.run(fresh(prompts, 2), 0, args.tokens).cpu_s
                + args.tokens * products.padded_s(count),
                "peft": peer.serve(list(zip(folders, batches, strict=False)), args.tokens),
            }
            if count <= args.packed:
                seconds["packed"] = packed_s(base, batches, args.tokens)
            seconds["loraplex"] = ours_s
            for side, side_s in seconds.items():
                ratios.setdefault(side, []).append(side_s / ours_s)
        found = {side: statistics.median(values) for side, values in ratios.items()}
        runs.append({"adapters": count, "over_loraplex": found})
        names = ("merged", "padded", "packed", "peft")
        rows.append([str(count), *(f"{found.get(n, float('nan')):.2f}" for n in names)])
        print(rows[-1], flush=True)
    print_table(["ADAPTERS", "MERGED", "PADDED", "PACKED", "PEFT"], rows)
    write_results("baselines", {"runs": runs}, args)


if __name__ == "__main__":
    main()

"""A base with unusual layers on a CPU: the engine in process, compared with transformers.

    python -m benchmarks run cpu.recurrent [--family gemma4] [--requests 8] [--repetitions 3]

Qwen 3.5 of about half a billion parameters (18 gated delta nets and 6 layers with attention), or
Gemma 4 (24 layers of two shapes, of which 14 read the keys of others, with inputs of their own),
with random weights, stored in bfloat16. All requests come at once; greedy. The sides alternate.
Prints transformers' time over ours for decode steps and for whole runs, by the wall and by
processor time, and writes `results/<machine>/cpu_recurrent.json` or `cpu_gemma4.json`. Numbers
compare within one run only.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.sides import OurEngine, PeftMixed, Run
from benchmarks.machine import write_results

GEOMETRY = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
"""That of Qwen3.5-0.8B, with a smaller vocabulary."""
GEMMA4 = {
    "vocab_size": 32000,
    "vocab_size_per_layer_input": 32000,
    "hidden_size": 1024,
    "hidden_size_per_layer_input": 128,
    "intermediate_size": 3072,
    "use_double_wide_mlp": True,
    "num_hidden_layers": 24,
    "num_kv_shared_layers": 14,
    "layer_types": ([*["sliding_attention"] * 5, "full_attention"] * 4),
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}
"""That of Gemma 4 E2B, with two thirds of its layers and width, and a smaller vocabulary."""
FAMILIES = {
    "qwen3.5": ("Qwen3_5TextConfig", GEOMETRY, "cpu_recurrent"),
    "gemma4": ("Gemma4TextConfig", GEMMA4, "cpu_gemma4"),
}
"""Class of the config, its fields, name of the results."""
RATIOS = ("step_s", "step_cpu_s", "first_token_s", "wall_s", "cpu_s")
NUM_THREADS = torch.get_num_threads()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="unusual layers compared with transformers")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3.5")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = make_base(Path(scratch), args.family)
        sides: dict[str, Any] = {
            "loraplex": OurEngine(base, args.dtype, "auto", 1 << 30),
            "transformers": PeftMixed(base, args.dtype, NUM_THREADS),
        }
        runs: dict[str, list[Run]] = {name: [] for name in sides}
        for repetition in range(-1, args.repetitions):
            prompts = make_prompts(args.requests, args.prompt_tokens, repetition)
            for name, side in sides.items():
                run = side.run(prompts, 0, args.new_tokens if repetition >= 0 else 2)
                if repetition >= 0:
                    runs[name].append(run)
                    print(name, {key: round(value, 4) for key, value in asdict(run).items()})
    ratios = {key: ratio(runs, key) for key in RATIOS}
    for key, value in ratios.items():
        print(f"{key}: transformers takes {value:.2f}x as long, median of {args.repetitions} turns")
    found = {name: [asdict(run) for run in own] for name, own in runs.items()}
    write_results(
        FAMILIES[args.family][2], {"options": vars(args), "ratios": ratios, "runs": found}
    )


def ratio(runs: dict[str, list[Run]], key: str) -> float:
    """Transformers over ours, each turn by itself."""
    pairs = zip(runs["transformers"], runs["loraplex"], strict=True)
    return statistics.median(getattr(theirs, key) / getattr(ours, key) for theirs, ours in pairs)


def make_base(folder: Path, family: str) -> Path:
    """Random weights, as transformers writes them."""
    import transformers

    torch.manual_seed(0)
    class_name, fields, _ = FAMILIES[family]
    config = getattr(transformers, class_name)(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "base")
    return folder / "base"


def make_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Fresh in every repetition."""
    rng = random.Random(seed)
    return [[rng.randrange(3, GEOMETRY["vocab_size"]) for _ in range(length)] for _ in range(count)]


if __name__ == "__main__":
    main()

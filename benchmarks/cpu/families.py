"""Every family of bases at about half a billion parameters: speed relative to transformers.

    python -m benchmarks run cpu.families [--only qwen3,gemma4] [--requests 8] [--repetitions 3]

Random weights, stored in bfloat16; greedy; all requests at once, first without adapters and then
each with an adapter of its own, as PEFT writes them, on every linear (on attention only in two
families with experts). The sides alternate. Families
with code here run with it. The other families, and some of these as well, run through the
transformers library (`--model-impl transformers`). Prints the ratios of each family and writes
`results/<machine>/cpu_families.json`; with `--only`, other families keep their lines. Compare
numbers within one line only.
"""

from __future__ import annotations

import gc
import os
import random
import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.cpu.sides import OurEngine, PeftMixed, alternated, median_ratio_of
from benchmarks.cpu_model import dtype_of, peer_dtype_of
from benchmarks.machine import (
    RESULTS,
    cpu_facts,
    machine_kind,
    options_of,
    read_results,
    write_results,
)

VOCAB_SIZE = 32000
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "pad_token_id": 1,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
DELTA_NETS: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""Layers of Qwen3.5-0.8B."""
GEMMA4: dict[str, Any] = {
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 128,
    "use_double_wide_mlp": True,
    "num_kv_shared_layers": 14,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
}
"""Gemma 4 E2B with two thirds of its layers and of its width."""
GPT_OSS: dict[str, Any] = {
    "intermediate_size": 768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 64,
}
RANK = 16
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
"""For families in which PEFT moves the other names to experts, for which it cannot mix batches."""
NATIVE, LIBRARY = "native", "transformers"
RATIOS = ("wall_s", "cpu_s", "step_s", "step_cpu_s", "first_token_s")


class Family(NamedTuple):
    """A family in the geometry that is measured."""

    config: str
    """Class of the transformers library."""
    changes: dict[str, Any]
    """Fields of the config that differ from `COMMON`."""
    model_impl: str = NATIVE
    target_modules: str | list[str] = "all-linear"


FAMILIES = {
    "llama": Family("LlamaConfig", {}),
    "mistral": Family("MistralConfig", {}),
    "ministral3": Family("Ministral3Config", {"head_dim": 64}),
    "qwen2": Family("Qwen2Config", {}),
    "qwen3": Family("Qwen3Config", {"head_dim": 64}),
    "qwen3-moe": Family("Qwen3MoeConfig", {"head_dim": 64, **EXPERTS}, NATIVE, ATTENTION),
    "qwen3.5": Family("Qwen3_5TextConfig", DELTA_NETS),
    "qwen3-next": Family("Qwen3NextConfig", {**DELTA_NETS, **EXPERTS}, NATIVE, ATTENTION),
    "gemma2": Family("Gemma2Config", {"head_dim": 64}),
    "gemma3": Family("Gemma3TextConfig", {"head_dim": 64}),
    "gemma4": Family("Gemma4TextConfig", GEMMA4),
    "gpt-oss": Family("GptOssConfig", GPT_OSS),
    "phi3": Family("Phi3Config", {}),
    "mixtral": Family("MixtralConfig", {"intermediate_size": 768}, NATIVE, ATTENTION),
    "llama-library": Family("LlamaConfig", {}, LIBRARY),
    "granite": Family("GraniteConfig", {}, LIBRARY),
    "olmo2": Family("Olmo2Config", {}, LIBRARY),
    "smollm3": Family("SmolLM3Config", {}, LIBRARY),
}


def main() -> None:
    """Measure, print, write."""
    args = parse_args()
    names = args.only.split(",") if args.only else list(FAMILIES)
    lines = known_lines() if args.only else {}
    for name in names:
        lines[name] = measured(FAMILIES[name], args)
        print(name, {key: round(value, 2) for key, value in lines[name]["ratios"].items()})
        write_results("cpu_families", {"families": lines}, args)
    print(table(lines))


def parse_args() -> Namespace:
    """Options."""
    parser = options_of(__doc__)
    parser.add_argument("--only", default="", metavar="NAMES", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--dtype", default=dtype_of(), help="of the engine")
    parser.add_argument("--peer-dtype", default=peer_dtype_of(), help="of transformers")
    args = parser.parse_args()
    unknown = set(filter(None, args.only.split(","))) - set(FAMILIES)
    if unknown:
        parser.error(f"--only: there is no family {', '.join(sorted(unknown))}")
    return args


def known_lines() -> dict[str, Any]:
    """The lines that an earlier run on a machine of this kind wrote."""
    if not (RESULTS / machine_kind(cpu_facts()) / "cpu_families.json").exists():
        return {}
    lines: dict[str, Any] = read_results("cpu_families")["families"]
    return lines


def measured(family: Family, args: Namespace) -> dict[str, Any]:
    """One family on both sides: medians of the ratios, and the runs."""
    gc.collect()
    with tempfile.TemporaryDirectory() as scratch:
        base, adapters = make_files(family, Path(scratch), args.requests)
        sides: dict[str, Any] = {
            "loraplex": OurEngine(base, args.dtype, "auto", 1 << 30, model_impl=family.model_impl),
            "transformers": PeftMixed(base, args.peer_dtype, torch.get_num_threads()),
        }
        amounts = args.new_tokens, args.repetitions
        prompts_of = partial(random_prompts, args.requests, args.prompt_tokens)
        runs = {"base": alternated(sides, prompts_of, 0, *amounts)}
        for side in sides.values():
            side.load(adapters)
        runs["adapters"] = alternated(sides, prompts_of, len(adapters), *amounts)
    ratios = {
        f"{case} {key}": median_ratio_of(own["transformers"], own["loraplex"], key)
        for case, own in runs.items()
        for key in RATIOS
    }
    return {
        "model_impl": family.model_impl,
        "load_average_at_end": os.getloadavg(),
        "ratios": ratios,
        "runs": runs,
    }


def random_prompts(num_prompts: int, num_tokens: int, repetition: int) -> list[list[int]]:
    """The prompts of one repetition."""
    rng = random.Random(repetition)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)] for _ in range(num_prompts)]


def make_files(family: Family, folder: Path, num_adapters: int) -> tuple[Path, list[Path]]:
    """A base as transformers writes it and adapters as PEFT writes them, of random weights."""
    import peft
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**{**COMMON, **family.changes})
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "base")
    lora = peft.LoraConfig(
        r=RANK,
        target_modules=family.target_modules,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    # Names are not bare numbers: PEFT would take `layers.1` for a part of the adapter's name.
    names = [f"adapter-{i}" for i in range(num_adapters)]
    for name in names:
        if name == names[0]:
            model = peft.get_peft_model(model, lora, adapter_name=name)
        else:
            model.add_adapter(name, lora)
    model.save_pretrained(folder / "adapters")
    return folder / "base", [folder / "adapters" / name for name in names]


def table(lines: dict[str, Any]) -> str:
    """One line a family: how many times as long transformers takes."""
    columns = "base wall_s", "base step_s", "base first_token_s", "adapters wall_s"
    titles = "base, end to end", "base, step", "base, first token", "adapters, end to end"
    rows = [f"| family | model code | {' | '.join(titles)} |", "|---|---|---|---|---|---|"]
    for name, line in lines.items():
        cells = " | ".join(f"{line['ratios'][column]:.2f}" for column in columns)
        rows.append(f"| {name} | {line['model_impl']} | {cells} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()

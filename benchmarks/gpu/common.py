"""Geometries, the byte floor, stopwatches and the results folder of the GPU benchmarks."""

from __future__ import annotations

import json
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RESULTS = Path(__file__).parents[1] / "results"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_SEVEN = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
COPY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int

    @property
    def kv_size(self) -> int:
        """Width of keys, and of values."""
        return self.hidden_size // self.num_heads * self.num_kv_heads

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) of each projection of a layer."""
        hidden, width, kv = self.hidden_size, self.intermediate_size, self.kv_size
        return {
            "q_proj": (hidden, hidden),
            "k_proj": (hidden, kv),
            "v_proj": (hidden, kv),
            "o_proj": (hidden, hidden),
            "gate_proj": (hidden, width),
            "up_proj": (hidden, width),
            "down_proj": (width, hidden),
        }

    def weight_bytes(self, itemsize: int) -> int:
        """Weights that a decode step reads: all linears and the head."""
        linears = sum(i * o for i, o in self.linears.values())
        return itemsize * (self.num_layers * linears + self.vocab_size * self.hidden_size)

    def kv_bytes(self, num_tokens: int, itemsize: int) -> int:
        """Keys and values of so many positions."""
        return 2 * itemsize * self.num_layers * self.kv_size * num_tokens

    def adapter_bytes(self, rank: int, targets: tuple[str, ...], itemsize: int) -> int:
        """A and B of one adapter."""
        widths = sum(sum(self.linears[name]) for name in targets)
        return itemsize * self.num_layers * rank * widths


SHAPES = {
    "llama-3-8b": Shape("llama-3-8b", 128256, 4096, 14336, 32, 32, 8),
    "llama-2-7b": Shape("llama-2-7b", 32000, 4096, 11008, 32, 32, 32),
    "llama-2-13b": Shape("llama-2-13b", 32000, 5120, 13824, 40, 40, 40),
    "tiny": Shape("tiny", 128, 64, 96, 2, 4, 2),
}


def floor_s(
    shape: Shape,
    batch_size: int,
    context: int,
    num_adapters: int,
    adapter_bytes: int,
    itemsize: int,
    bytes_per_s: float,
) -> float:
    """The time that a decode step's bytes take at the measured copy bandwidth: weights once, keys
    and values of every sequence, each distinct adapter once."""
    num_bytes = (
        shape.weight_bytes(itemsize)
        + shape.kv_bytes(batch_size * context, itemsize)
        + num_adapters * adapter_bytes
    )
    return num_bytes / bytes_per_s


def write_base(shape: Shape, folder: Path, max_model_len: int) -> Path:
    """A base without weights: what `load_format="dummy"` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_adapter(
    shape: Shape, folder: Path, rank: int, targets: tuple[str, ...], dtype: torch.dtype
) -> Path:
    """An adapter as PEFT writes it, random."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(rank), {}
    for layer in range(shape.num_layers):
        for name in targets:
            num_inputs, num_outputs = shape.linears[name]
            block = "mlp" if name in ALL_SEVEN[4:] else "self_attn"
            module = f"base_model.model.model.layers.{layer}.{block}.{name}"
            a = torch.randn(rank, num_inputs, generator=generator) * num_inputs**-0.5
            b = torch.randn(num_outputs, rank, generator=generator) * 0.02
            tensors[f"{module}.lora_A.weight"] = a.to(dtype)
            tensors[f"{module}.lora_B.weight"] = b.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": shape.name,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


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


def copy_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Bytes read and written a second by a copy on the device."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * num_bytes / median_s(lambda: target.copy_(source), device, 10)


def device_facts(device: torch.device) -> dict[str, Any]:
    """What a reader needs to compare numbers."""
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
    """Write `<root>/<gpu name>/<name>.json`; returns its path."""
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

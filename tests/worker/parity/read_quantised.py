"""Reads the layouts of `quantised.py` with the libraries that define them.

    python -m tests.worker.parity.read_quantised [LAYOUT...]

It needs compressed-tensors 0.20, bitsandbytes 0.50, GPTQModel 7.7 and optimum 2.3, which the
project does not depend on: run it in an environment of its own. transformers loads each base by
these libraries, and its logits are compared with those of the weights that the codes mean. Prints
a row for each layout. The exit code is 1 if the logits of one differ by more than `MAX_ERROR`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers

from tests.worker.parity.bases import make_base
from tests.worker.parity.quantised import LAYOUTS, quantised_base

ROUND = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
"""The libraries refuse widths that are not whole groups."""
DEMO_BASE = Path(__file__).parents[3] / "demo" / "base"
MAX_ERROR = 0.01
"""Of a logit, relative to the largest. GPTQ's and AWQ's weights and products are in float16."""


def by_transformers(folder: Path, layout: str) -> transformers.PreTrainedModel:
    """With the library of the layout."""
    kernels = {}
    if layout == "awq":  # other kernels are compiled when they are first used
        kernels["quantization_config"] = transformers.AwqConfig(backend="torch_awq")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **kernels
    )
    if layout.startswith("bnb"):
        model.dequantize()  # bitsandbytes' own products round activations
    return model


def by_gptqmodel(folder: Path) -> transformers.PreTrainedModel:
    """By itself, because transformers does not read `dynamic`, the exceptions of GPTQ."""
    from gptqmodel import BACKEND, GPTQModel

    for file in DEMO_BASE.glob("tokenizer*.json"):  # GPTQModel wants one
        shutil.copy(file, folder)
    loaded = GPTQModel.load(str(folder), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)
    return loaded.model.float()


@torch.inference_mode()
def error_of(name: str, layout: str, root: Path) -> float:
    """The largest error of a logit, relative to the largest logit."""
    plain = make_base(name, root / "plain", **ROUND)
    base = quantised_base(plain, layout, root / "base")
    if layout.startswith("gptq"):
        theirs = by_gptqmodel(base.folder)
    else:
        theirs = by_transformers(base.folder, layout)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(base.config.vocab_size, (2, 24), generator=generator)
    expected, found = (model(ids).logits.float() for model in (base.model, theirs))
    return float((found - expected).abs().max() / expected.abs().max())


def main() -> int:
    """Read, compare, print."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    is_right = True
    for name in ("llama", "qwen3"):
        for layout in sys.argv[1:] or LAYOUTS:
            with tempfile.TemporaryDirectory() as root:
                error = error_of(name, layout, Path(root))
            is_right &= error <= MAX_ERROR
            print(f"| {name} | {layout} | {error:.0e} |", flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    raise SystemExit(main())

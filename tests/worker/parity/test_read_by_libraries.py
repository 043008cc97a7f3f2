"""The libraries that define the layouts read the files of `quantised.py` as we mean them.

transformers loads each base by its library, and its logits are compared with those of the weights
that the codes mean. A layout is skipped where its library is missing, because the project depends
on transformers only. To read all of them:

    pip install compressed-tensors==0.20.0 bitsandbytes==0.50.0
    pip install --no-deps GPTQModel==7.7.0 optimum==2.3.0  # which ask for newer versions of torch
    pip install --no-deps tokenicer logbar defuser device-smi pypcre threadpoolctl pillow
    pytest -m 'long or not long' tests/worker/parity/test_read_by_libraries.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers

from tests.worker.parity.bases import make_base
from tests.worker.parity.quantised import LAYOUTS, quantised_base

ROUND = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
"""The libraries refuse widths that are not whole groups."""
DEMO_BASE = Path(__file__).parents[3] / "demo" / "base"
LIBRARIES = {
    "ct": "compressed_tensors",
    "bnb": "bitsandbytes",
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
}
"""By the first word of a layout's name; transformers itself reads the others."""
MAX_ERROR = 1e-5
"""Of a logit, relative to the largest."""
MAX_ERROR_IN_HALF = 0.01
"""Of layouts whose weights the libraries widen to float16, as the scales are."""


def by_transformers(folder: Path, layout: str) -> transformers.PreTrainedModel:
    """With the library of the layout."""
    kernels = {}
    if layout == "awq":  # other kernels are compiled when they are first used
        kernels["quantization_config"] = transformers.AwqConfig(backend="torch_awq")
    elif layout.endswith("-zeros"):  # by default, it expects zero points that are not packed
        kernels["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        **kernels,
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


def _params():
    for name in ("llama", "qwen3", "gpt-oss"):
        for layout in LAYOUTS:
            if name == "gpt-oss" and layout.startswith("gptq"):
                continue  # GPTQModel expects a linear of each expert, which is refused here
            marks = [] if name == "llama" else [pytest.mark.long]
            yield pytest.param(name, layout, marks=marks, id=f"{name}-{layout}")


@torch.inference_mode()
@pytest.mark.parametrize(("name", "layout"), list(_params()))
def test_a_library_reads_a_layout_as_the_weights_that_we_mean(name, layout, tmp_path):
    library = LIBRARIES.get(layout.partition("-")[0])
    if library is not None:
        pytest.importorskip(library, reason=f"{library} is not installed")
    plain = make_base(name, tmp_path / "plain", **ROUND)
    base = quantised_base(plain, layout, tmp_path / "base")
    if layout.startswith("gptq"):
        theirs = by_gptqmodel(base.folder)
    else:
        theirs = by_transformers(base.folder, layout)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(base.config.vocab_size, (2, 24), generator=generator)
    expected, found = (model(ids).logits.float() for model in (base.model, theirs))
    error = float((found - expected).abs().max() / expected.abs().max())
    in_half = library == "gptqmodel" or layout.endswith("-zeros")
    assert error <= (MAX_ERROR_IN_HALF if in_half else MAX_ERROR)

"""Writes docs/parity-quantised.md: every format of quantised bases, with all kinds of adapters.

Usage: python -m tests.worker.parity.write_quantised [--only-cache]

With --only-cache, the section about the KV cache is written anew and the rest is kept.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from tests.worker.parity.adapters import features_of
from tests.worker.parity.bases import TinyBase, make_base
from tests.worker.parity.cache_codes import INTRODUCTION as CACHE_INTRODUCTION
from tests.worker.parity.cache_codes import section
from tests.worker.parity.gguf_files import gguf_base
from tests.worker.parity.mxfp4_files import mxfp4_base
from tests.worker.parity.quantised import LAYOUTS, quantised_base, quantised_on_load
from tests.worker.parity.suite import stage_of
from tests.worker.parity.write_families import (
    CHUNK_TOKENS,
    NUM_NEW_TOKENS,
    measured,
    provenance,
)

OUT = Path(__file__).parents[3] / "docs" / "parity-quantised.md"
GGUF = ("Q4_0", "Q5_0", "Q8_0", "Q4_K_M", "Q5_K_M")
INTRODUCTION = """# Parity of quantised bases

The bases are tiny and random, one in each layout. All kinds of random adapters that PEFT has for a
base decode in one continuous batch in float32. Requests arrive staggered, prompts are computed in
chunks of {chunk_tokens} tokens, and each request generates {num_new_tokens} greedy tokens. Every
token is compared with transformers and PEFT over the dequantised weights in float32, which run one
request at a time. The rules for near ties and sensitive positions are those of [the other
families](parity-families.md).

The tests use their own code to compute the weights that codes represent, and transformers for MXFP4
and GGUF. A format that [bases](reference/bases.md#quantised-bases) does not list for a family is
refused by name. In gpt-oss, MXFP4 stores the experts, and the other formats store the attention
linears, because they do not define one tensor for all experts of a layer.

The libraries that define the layouts read the same files: compressed-tensors 0.20, bitsandbytes
0.50, GPTQModel 7.7 (GPTQ, and AWQ through transformers) and transformers itself (`fp8`, MXFP4).
`tests/worker/parity/test_read_by_libraries.py` compares the logits of Llama, Qwen 3 and gpt-oss, at
widths that are multiples of the group size, with those of the weights that the codes represent.
They differ by at most 1e-05 of the largest logit. With GPTQ, AWQ and the layouts with zero points
of compressed-tensors, the limit is 1e-02, because the libraries widen these weights to float16.
GPTQModel does not read gpt-oss with plain experts. Tests of libraries that are not installed are
skipped.

`python -m
tests.worker.parity.write_quantised` wrote this page on {today}, with torch {torch}, transformers
{transformers} and peft {peft} on {chip}.

| base | format | adapters | positions | near ties | sensitive | largest logprob error |
|---|---|---|---|---|---|---|
"""


def bases(root: Path) -> Iterator[tuple[str, str, TinyBase, dict[str, str]]]:
    """(family, format, base, settings of the worker)."""
    for name in ("llama", "qwen3", "gpt-oss"):
        plain = make_base(name, root / name)
        for layout in LAYOUTS:
            yield name, layout, quantised_base(plain, layout, root / f"{name}-{layout}"), {}
        for scheme in ("int8", "int4", "fp8") if name != "gpt-oss" else ():
            meant = quantised_on_load(plain, scheme)
            yield name, f"--quantization {scheme}", meant, {"quantization": scheme}
    for name in ("mixtral", "qwen3-moe"):
        plain = make_base(name, root / name)
        for layout in ("ct-int4", "gptq", "bnb-int8"):
            yield name, layout, quantised_base(plain, layout, root / f"{name}-{layout}"), {}
        meant = quantised_on_load(plain, "int8")
        yield name, "--quantization int8", meant, {"quantization": "int8"}
    yield "gpt-oss", "MXFP4", mxfp4_base(root / "gpt-oss-mxfp4"), {}
    for name in ("llama", "qwen2", "qwen3"):
        for mixture in GGUF:
            folder = root / f"{name}-{mixture}"
            base = gguf_base(name, mixture, folder, folder.with_suffix(".base"))
            yield name, f"GGUF {mixture}", base, {}


def main() -> None:
    """Measure and write the document."""
    parser = argparse.ArgumentParser(description="Write docs/parity-quantised.md.")
    parser.add_argument("--only-cache", action="store_true", help="keep the other sections")
    only_cache = parser.parse_args().only_cache
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    heading = CACHE_INTRODUCTION.split("\n", 2)[1]
    page = OUT.read_text().partition(f"\n{heading}\n")[0] if only_cache else formats_page()
    OUT.write_text(page + "\n".join(section()) + "\n")


def formats_page() -> str:
    """What the page says of formats."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for number, (name, layout, base, settings) in enumerate(bases(root)):
            stage = stage_of(base, features_of(base), root / f"adapters-{number}", **settings)
            found = measured(stage, 1)
            lines.append(f"| {name} | {layout} | {' | '.join(map(str, found.values()))} |\n")
            print(lines[-1], end="", flush=True)
    text = INTRODUCTION.format(
        chunk_tokens=CHUNK_TOKENS,
        num_new_tokens=NUM_NEW_TOKENS,
        **provenance(),
    )
    return text + "".join(lines)


if __name__ == "__main__":
    main()

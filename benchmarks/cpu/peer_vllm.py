"""vLLM's CPU build, as `cpu.peers` drives it: `PYTHON peer_vllm.py BASE ROWS [ADAPTER ...]`.

Runs in vLLM's own environment, without anything of this project. Adapters are folders as PEFT
writes them; without any, vLLM starts without LoRA. `PEER_DTYPE` is the dtype in which it computes,
bfloat16 by default. Under `ONEDNN_MAX_CPU_ISA`, vLLM's own kernels are of that level, too.
`peer_wire` says what this program reads and answers.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import peer_wire

MAX_TOKENS = 256
MAX_RANK = 64
ABOVE = {
    "AVX512_CORE_BF16": ("_is_amx_tile_supported", "_is_amx_fp16_supported"),
    "AVX512_CORE": ("_is_avx512_bf16_supported",),
    "AVX2": ("_is_avx512_supported",),
}
"""For each level, by oneDNN's name: the checks of torch that are false at this level and below
it."""


def keep_level(level: str | None) -> None:
    """Keep vLLM from kernels above a level; None = the processor's best.

    vLLM has a library for each level and asks torch which one to load. Torch answers for the
    processor, whatever its environment says.
    """
    import torch

    names = list(ABOVE)
    for name in names[: names.index(level) + 1] if level else ():
        for question in ABOVE[name]:
            setattr(torch.cpu, question, lambda: False)


def main() -> None:
    """Answer until the input ends."""
    answer = peer_wire.answers()
    keep_level(os.environ.get("ONEDNN_MAX_CPU_ISA"))
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    base, num_rows, *adapters = sys.argv[1:]
    lora: dict[str, Any] = {}
    if adapters:
        lora = {"enable_lora": True, "max_lora_rank": MAX_RANK, "max_loras": len(adapters)}
    llm = LLM(
        base,
        dtype=os.environ.get("PEER_DTYPE", "bfloat16"),
        skip_tokenizer_init=True,
        max_model_len=MAX_TOKENS,
        max_num_seqs=int(num_rows),
        enable_prefix_caching=False,
        **lora,
    )
    requests = [LoRARequest(str(i), i + 1, path) for i, path in enumerate(adapters)]
    answer("ready")
    for batch in peer_wire.batches():
        params = SamplingParams(
            temperature=0, max_tokens=batch.num_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in batch.prompts]
        chosen = [None if i is None else requests[i] for i in batch.adapters]
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        outputs = llm.generate(
            inputs, params, lora_request=chosen if adapters else None, use_tqdm=False
        )
        wall_s = time.perf_counter() - begin_s
        cpu_s = time.process_time() - begin_cpu_s
        token_ids = [list(o.outputs[0].token_ids) for o in outputs]
        answer({"wall_s": wall_s, "cpu_s": cpu_s, "outputs": token_ids})


if __name__ == "__main__":
    main()

"""vLLM's CPU build, as `cpu.peers` drives it: `PYTHON peer_vllm.py BASE ROWS [ADAPTER ...]`.

Runs in vLLM's own environment, without anything of this project. Adapters are folders as PEFT
writes them; without any, vLLM starts without LoRA. `peer_wire` says what this program reads and
answers.
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


def main() -> None:
    """Answer until the input ends."""
    answer = peer_wire.answers()
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    base, num_rows, *adapters = sys.argv[1:]
    lora: dict[str, Any] = {}
    if adapters:
        lora = {"enable_lora": True, "max_lora_rank": MAX_RANK, "max_loras": len(adapters)}
    llm = LLM(
        base,
        dtype="bfloat16",
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

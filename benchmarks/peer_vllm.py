"""vLLM as `cpu_peers` drives it: `VENV/bin/python benchmarks/peer_vllm.py MODEL DTYPE MAX_SEQS`.

Runs in vLLM's own environment, without anything of this project. Reads a line of JSON, a list of
prompts (token ids) and a number of new tokens; answers with a line, the seconds until all were
done.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
MAX_TOKENS = 256


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM prints
    from vllm import LLM, SamplingParams

    model, dtype, max_seqs = sys.argv[1:]
    llm = LLM(
        model,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=MAX_TOKENS,
        max_num_seqs=int(max_seqs),
        enable_prefix_caching=False,
    )
    print("ready", file=answers, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            prompts, num_tokens = json.loads(line)
            params = SamplingParams(
                temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
            )
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            begin_s = time.perf_counter()
            outputs = llm.generate(inputs, params, use_tqdm=False)
            wall_s = time.perf_counter() - begin_s
            assert all(len(out.outputs[0].token_ids) == num_tokens for out in outputs)
            print(wall_s, file=answers, flush=True)


if __name__ == "__main__":
    main()

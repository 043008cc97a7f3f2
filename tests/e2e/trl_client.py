"""TRL's own clients against a gateway: trl_client.py URL BASE FOLDER.

Run by `test_trainers.py` in an environment that has TRL and vLLM's package, without which TRL
refuses to start. BASE is the folder of the served base, and the gateway reads adapters below
FOLDER. Prints what the calls returned as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import save_lora_adapter, select_adapter_sync
from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncClient
from trl.generation.vllm_client import VLLMClient

PROMPT = [256, *b"qoha 688="]
"""Begin of text, then bytes: the tokens of the demo base."""
NUM_UPDATES, KEPT = 3, 2


def generate(url: str) -> dict[str, Any]:
    """The calls of the trainers that wait for each batch."""
    client = VLLMClient(base_url=url)
    client.model = "upper"
    drawn = client.generate([PROMPT, PROMPT[:7]], n=2, max_tokens=8, temperature=1.0, logprobs=1)
    client.reset_prefix_cache()
    answer = drawn["completion_ids"][0]
    scored = client.get_sequence_logprobs([PROMPT + answer], [len(PROMPT)], top_logprobs=100)
    try:
        client.init_communicator(device="cpu")
    except RuntimeError as error:
        refusal = str(error)
    return {
        "lengths": [len(ids) for ids in drawn["completion_ids"]],
        "sampled": [
            position[ids.index(token)]
            for position, ids, token in zip(
                drawn["logprobs"][0], drawn["logprob_token_ids"][0], answer, strict=True
            )
        ],
        "scored": [position[0] for position in scored["actual_logprobs"][0]],
        "refusal": refusal,
    }


def publish(url: str, base: str, folder: Path) -> dict[str, Any]:
    """What the asynchronous trainer does at the start and after each step. The trainer itself
    needs CUDA."""
    args = AsyncGRPOConfig(output_dir=str(folder), use_cpu=True, report_to="none")
    accelerator = Accelerator(cpu=True)  # the client logs through it
    client = AsyncClient(url, server_timeout=30)
    client.wait_for_server_ready()
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    sends_adapters = select_adapter_sync(client.get_server_info(), model, args)
    for version in range(1, NUM_UPDATES + 1):
        name = f"trl-policy-v{version}"
        client.pause()
        save_lora_adapter(model, accelerator, "default", str(folder / ".vllm_lora" / name))
        client.load_lora_adapter(name, str(folder / ".vllm_lora" / name))
        client.resume()
        if version > KEPT:
            client.unload_lora_adapter(f"trl-policy-v{version - KEPT}")
    return {
        "sends_adapters": sends_adapters,
        "dtype": client.get_dtype(),
        "max_model_len": client.get_max_model_len(),
    }


def main(url: str, base: str, folder: str) -> None:
    done = {"generate": generate(url), "publish": publish(url, base, Path(folder) / "trl")}
    print(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One update and its rollouts with SkyRL's own HTTP client: skyrl_client.py URL FOLDER FOLDER.

Run by `test_skyrl.py` in an environment that has SkyRL. Prints the tokens of each rollout as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    RemoteInferenceClient,
)

PROMPT = [256, *b"qoha 688="]
"""Begin of text, then bytes: the tokens of the demo base."""
GREEDY = {"max_tokens": 12, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "logprobs": 0}


async def main(url: str, *folders: str) -> None:
    client = RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="loraplex-demo"
    )
    rollouts = []
    for folder in folders:
        await client.pause("keep")
        await client.load_lora_adapter("skyrl-lora", folder)
        await client.reset_prefix_cache(reset_running_requests=True)
        await client.resume()
        batch = {"prompt_token_ids": [PROMPT] * 2, "sampling_params": GREEDY, "session_ids": "ab"}
        done = await client.generate(batch, model="skyrl-lora")
        assert all(map(len, done["response_logprobs"])), "logprobs are missing"
        rollouts.append({key: done[key] for key in ("responses", "response_ids", "stop_reasons")})
    sampled = await client.sample(
        {
            "json": {
                "model": "skyrl-lora",
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
                "num_samples": 3,
                "sampling_params": {"temperature": 1.0, "max_tokens": 4, "seed": 1},
                "include_prompt_logprobs": True,
                "topk_prompt_logprobs": 2,
                "session_id": "c",
            }
        }
    )
    await client.unload_lora_adapter("skyrl-lora")
    print(json.dumps({"rollouts": rollouts, "sampled": sampled}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

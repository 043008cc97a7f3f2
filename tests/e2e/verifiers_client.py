"""A rollout's turn with the client that prime-rl samples with: verifiers_client.py URL BASE.

Run by `test_trainers.py` in an environment that has `verifiers` and `renderers`. BASE is the folder
of the served base. Prints the tokens as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys

from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig


async def main(url: str, base: str) -> None:
    client = TrainClient(TrainClientConfig(base_url=f"{url}/v1", renderer_model_name=base))
    body = {"model": "upper", "messages": [{"role": "user", "content": "qoha 688"}]}
    sampling = SamplingConfig(temperature=0.0, max_tokens=12)
    answer = await client.get_response(ChatDialect(), body, sampling, session_id="a")
    tokens = answer.tokens
    done = {
        "content": answer.message.content,
        "finish_reason": answer.finish_reason,
        "completion_ids": tokens.completion_ids,
        "logprobs": tokens.completion_logprobs,
    }
    print(json.dumps(done))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

"""Updates and scores with prime-rl's own client: prime_rl_client.py URL FOLDER FOLDER.

Run by `test_trainers.py` in an environment that has prime-rl. The gateway reads adapters from each
FOLDER. Prints the scores of one text under each of them as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from prime_rl.configs.shared import ClientConfig
from prime_rl.utils.client import InferencePool, unload_lora_adapter

BASE, POLICY = "loraplex-demo", "prime-policy"
TOKENS = [256, *b"qoha 688=QOHA 688"]
"""Begin of text, then bytes: the tokens of the demo base."""


async def main(url: str, *folders: str) -> None:
    pool = InferencePool(ClientConfig(base_url=f"{url}/v1"), BASE)
    await pool.wait_for_ready(BASE, timeout=30)
    scores = []
    for step, folder in enumerate(folders, 1):
        await pool.update_weights(Path(folder), lora_name=POLICY, step=step)
        pool.update_model_name(POLICY)
        await pool.wait_for_ready(POLICY, timeout=30)
        scores.append(await pool.score(TOKENS))
    await unload_lora_adapter(pool.admin_clients, POLICY)
    await pool.stop()
    print(json.dumps(scores))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

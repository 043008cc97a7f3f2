"""The requests of verl's generation over HTTP: verl_client.py URL MODEL.

Run by `test_trainers.py` in an environment that has verl. The rest of verl generates on servers
that it starts itself. Prints the answers as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np
from verl.trainer.main_generation_server import generate

SAMPLING = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 12}


async def main(url: str, model: str) -> None:
    chats = np.array([[{"role": "user", "content": text}] for text in ("qoha 688", "zamihi 19")])
    address = url.removeprefix("http://")
    [answers] = await generate([address], model, 2, SAMPLING, chats)
    print(json.dumps([answer.choices[0].message.content for answer in answers]))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

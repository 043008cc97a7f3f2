"""Decoding speed through the whole stack over HTTP, compared with the same engine in process.

    python -m benchmarks run serving.http_overhead --work-dir DIR [--requests 32] [--adapters 8]

The stack is `loraplex up` with its defaults and published adapters. Clients are threads of this
process, one per request, that wait for complete answers. Both sides get the same prompts (token
ids), all at once, and as many new tokens. They alternate with fresh prompts, and one side sleeps
while the other works.
"""

from __future__ import annotations

import http.client
import json
import statistics
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor

from benchmarks.cpu.sides import OurEngine
from benchmarks.cpu_model import SHAPES, engine_options, make_adapter, make_base, make_prompts
from benchmarks.machine import write_results
from demo.run import publish
from demo.stack import running_stack

BASE_ID = "base"
ARENA_BYTES = 2_000_000_000
TIMEOUT_S = 300.0


def main() -> None:
    """Measure, print, write."""
    args = parse_args()
    shape = SHAPES[args.model]
    base = make_base(shape, args.work_dir)
    folders = [make_adapter(shape, args.work_dir, i) for i in range(args.adapters)]
    ours = OurEngine(base, "auto", "auto", ARENA_BYTES)
    ours.load(folders)
    ratios = []
    with running_stack(base, BASE_ID, args.work_dir / "http-state") as stack:
        for adapter in range(args.adapters):  # fresh folders: the engine put images into its own
            publish(make_adapter(shape, args.work_dir / "published", adapter), stack.registry)
        names = [folder.name for folder in folders]
        host = stack.http.removeprefix("http://")
        ask_all(host, make_prompts(args.requests, shape.vocab_size, seed=-1), names, 2)
        ours.run(make_prompts(args.requests, shape.vocab_size, seed=-1), args.adapters, 2)
        for repetition in range(args.repetitions):
            prompts = make_prompts(args.requests, shape.vocab_size, seed=repetition)
            over_http_s = ask_all(host, prompts, names, args.new_tokens)
            in_process_s = ours.run(prompts, args.adapters, args.new_tokens).wall_s
            ratios.append(in_process_s / over_http_s)
            rate = args.requests * args.new_tokens
            print(f"HTTP {rate / over_http_s:.0f} tok/s, in process {rate / in_process_s:.0f}")
    ratio = round(statistics.median(ratios), 3)
    print(f"speed over HTTP / in process: {ratio}")
    write_results("cpu_http", {"http_over_in_process": ratio, "all": ratios}, args)


def parse_args() -> Namespace:
    """Options."""
    parser = engine_options(__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    return parser.parse_args()


def ask_all(host: str, prompts: list[list[int]], names: list[str], num_tokens: int) -> float:
    """Send all requests at once, adapters in turn. Returns the seconds to the last answer."""
    begin_s = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as threads:
        jobs = [
            threads.submit(ask, host, prompt, names[i % len(names)], num_tokens)
            for i, prompt in enumerate(prompts)
        ]
        for job in jobs:
            assert job.result() == num_tokens, job.result()
    return time.perf_counter() - begin_s


def ask(host: str, prompt: list[int], name: str, num_tokens: int) -> int:
    """Send one request. Returns how many tokens came."""
    body = {
        "model": name,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    connection = http.client.HTTPConnection(host, timeout=TIMEOUT_S)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    assert response.status == 200, text
    return len(json.loads(text)["choices"][0]["token_ids"])


if __name__ == "__main__":
    main()

"""Host time of choosing a step's tokens: lists, uploads and launches, not the work on logits.

    python -m benchmarks run cpu.sampling_host [--outputs 64]

Prints CPU milliseconds (one thread, process time) and torch operators of `sample` for 64 and 256
rows of a vocabulary of 256 tokens, where truncation and draws cost nothing. The last token of each
row is known to the device only, as in a running engine.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.sampling.drawing import DrawOperators
from loraplex_services.worker.sampling.next_token import NextToken
from loraplex_services.worker.sampling.sampler import sample
from loraplex_services.worker.types.request import Request

VOCABULARY = 256
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "truncated": {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    "everything": {
        "temperature": 1.0,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logit_bias": ((3, 1.0), (9, -2.0)),
        "min_tokens": 500,
        "bad_token_ids": (7,),
        "stop_token_ids": (8,),
    },
}
FREE = DrawOperators(lambda scores, limits: None, lambda scores, keys: scores[:, 0].long())


class CountOperators(TorchDispatchMode):
    """Counts torch operators."""

    num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one and run it."""
        self.num_operators += 1
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def main() -> None:
    """Run the command."""
    args = parse_args()
    torch.set_num_threads(1)
    for kind, params in KINDS.items():
        for num_rows in (64, 256):
            tokens = tokens_of(params, num_rows, args.outputs)
            logits, rows = torch.randn(num_rows, VOCABULARY), torch.arange(num_rows)

            def choose(
                rows: Tensor = rows, tokens: list[NextToken] = tokens, logits: Tensor = logits
            ) -> None:
                sample(rows, tokens, lambda _: logits.clone(), (2,), FREE)

            choose()
            begin_s = time.process_time()
            for _ in range(args.repetitions):
                choose()
            milliseconds = 1e3 * (time.process_time() - begin_s) / args.repetitions
            with CountOperators() as counted:
                choose()
            print(
                f"{kind}, {num_rows} rows, {args.outputs} outputs: {milliseconds:.2f} ms, "
                f"{counted.num_operators} operators"
            )


def tokens_of(params: dict[str, Any], num_rows: int, num_outputs: int) -> list[NextToken]:
    """The next token of each row."""
    outputs = torch.randint(VOCABULARY, (num_rows,))
    tokens = []
    for i in range(num_rows):
        request = Request(f"r{i}", [1], SamplingParams(max_tokens=1000, seed=i, **params))
        request.output_ids = [(7 * i + 13 * j) % VOCABULARY for j in range(num_outputs)]
        tokens.append(NextToken(request, num_outputs + 1, follows=i, outputs=outputs))
    return tokens


def parse_args() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--outputs", type=int, default=64, help="tokens that each row has")
    parser.add_argument("--repetitions", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    main()

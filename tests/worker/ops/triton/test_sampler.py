"""A step's tokens by the GPU's operators: the same as by torch, and without a wait."""

import torch

from loraplex.api.sampling import SamplingParams
from loraplex_services.worker.sampling.next_token import NextToken
from loraplex_services.worker.sampling.sampler import sample
from loraplex_services.worker.types.request import Request
from tests.worker.ops.triton.reads import note_reads
from tests.worker.ops.triton.test_runner import AsksNobody

VOCAB = 300
KINDS = [
    {},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 1.2, "min_p": 0.1, "bad_token_ids": (3, 4), "logit_bias": ((8, 2.0),)},
    {"temperature": 0.7, "allowed_token_ids": (1, 2, 9), "min_tokens": 9},
    {"temperature": 1.0},
]


def tokens_of(outputs):
    tokens = []
    for i in range(18):
        params = SamplingParams(max_tokens=50, seed=i, stop_token_ids=(7,), **KINDS[i % 6])
        request = Request(f"r{i}", [1], params)
        request.output_ids = [(5 * j + i) % VOCAB for j in range(i)]
        tokens.append(NextToken(request, i + 1, follows=i, outputs=outputs))
    return tokens


def test_tokens_are_those_of_torch_and_nothing_waits_for_the_device(device, monkeypatch):
    from loraplex_services.worker.layers.triton_operators import TritonOperators
    from loraplex_services.worker.sampling.drawing import TORCH_DRAWS

    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(18, VOCAB, generator=generator) * 2).to(device)
    tokens = tokens_of(torch.arange(18, device=device))
    rows = torch.arange(18)
    expected = sample(rows, tokens, lambda rows: logits.clone(), (2,), TORCH_DRAWS)
    reads = note_reads(monkeypatch)
    with AsksNobody() as asked:
        found = sample(rows, tokens, lambda rows: logits.clone(), (2,), TritonOperators.draws)
    assert asked.num_operators > 20
    # On a CPU, the host looks whether further tokens are as likely as the last one found.
    assert asked.questions == ([] if device.type == "cuda" else ["_local_scalar_dense"])
    assert reads == []
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert found.read() == expected.read()

"""Measures how far an adapter on the served base diverges from that on a reference base.

Probe texts go to both gateways as ordinary requests of the lowest priority, one at a time. Each
answers with the most likely tokens at every position of the text. The divergence at a position is
the smallest that two distributions with these answers can have. It is a lower bound of the
divergence over the whole vocabulary, zero if the answers are equal, and large if they name
different tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.api.output import TokenLogprob
from loraplex.api.sampling import Sampling
from loraplex.client.inference_client import InferenceClient
from loraplex.errors import Blocked, InvalidRequest, NotFound

NUM_CANDIDATES = 20
"""Number of most likely tokens that are compared at each position, which is the most that a gateway
returns."""
LOWEST_PRIORITY = 1_000_000
LEAST_PROBABILITY = 1e-9
"""Lower bound on the total probability of all other tokens. Logprobs are rounded, so the
probabilities may add up to more than 1."""
PROBE_TEXTS = (
    "The committee approved the budget on Tuesday, after a long debate about the cost of the new "
    "library. Most members agreed that the old building could not be repaired.",
    "Question: A train leaves at 9:40 and arrives at 13:05. How long does the journey take?\n"
    "Answer: It takes 3 hours and 25 minutes, because",
    "def moving_average(values, width):\n    total = 0.0\n    for i, value in enumerate(values):\n"
    "        total += value\n        if i >= width:\n            total -= values[i - width]\n",
    '{"order": 48213, "items": [{"name": "lamp", "price": 39.9}, {"name": "desk", "price": 210}], '
    '"paid": true, "city": "Lyon"}',
    "Dear Ms. Okafor,\n\nThank you for your letter of 4 March. We are sorry that your parcel was "
    "damaged, and have sent a new one today. Please keep the receipt.",
    "Die Werkstatt öffnet um acht Uhr. Wer sein Fahrrad vorher abgibt, kann es am selben Abend "
    "wieder abholen, sofern alle Ersatzteile vorrätig sind.",
    "Water boils at a lower temperature on a mountain because the pressure of the air is lower "
    "there. At 3,000 metres it boils at about 90 degrees Celsius.",
    "Translate into French: The weather was cold, but the children wanted to swim.\nLe temps",
)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The divergence of the served distributions from those of the reference, over all
    positions."""

    num_tokens: int
    mean_kl: float
    """KL(reference || served) per token, in nats."""
    max_kl: float
    """The largest divergence at one token."""
    top1_agreement: float
    """Share of positions at which both have the same most likely token."""


def divergence_at(reference: TokenLogprob, served: TokenLogprob) -> float:
    """The smallest KL(reference || served), in nats, that two distributions with these answers can
    have."""
    expected, found = _probabilities(reference), _probabilities(served)
    shared = expected.keys() & found.keys()
    kl = sum(expected[token] * math.log(expected[token] / found[token]) for token in shared)
    # Two more outcomes: all tokens that only the reference names, and all that it does not name.
    p_named = sum(p for token, p in expected.items() if token not in shared)
    p_others = max(1 - sum(expected.values()), LEAST_PROBABILITY)
    q_left = max(1 - sum(found[token] for token in shared), LEAST_PROBABILITY)
    if not p_named:
        return max(0.0, kl + p_others * math.log(p_others / q_left))
    # The served distribution gives the first of them at most what its named tokens leave over, and
    # each token at most as much as the last that it names. Within these bounds, the value nearest
    # to the reference is taken.
    num_named = len(expected) - len(shared)
    q_taken = sum(q for token, q in found.items() if token not in shared)
    least = min(_probability(candidate.logprob) for candidate in served.top)
    most = min(num_named * least, q_left - q_taken)
    q_named = min(max(most, LEAST_PROBABILITY), q_left * p_named / (p_named + p_others))
    q_others = max(q_left - q_named, LEAST_PROBABILITY)
    kl += p_named * math.log(p_named / q_named) + p_others * math.log(p_others / q_others)
    return max(0.0, kl)


def _probability(logprob: float) -> float:
    return max(math.exp(logprob), 1e-30)


def _probabilities(entry: TokenLogprob) -> dict[int, float]:
    named = {candidate.token_id: candidate.logprob for candidate in entry.top}
    named[entry.token_id] = entry.logprob
    return {token: _probability(logprob) for token, logprob in named.items()}


def divergence(
    reference: Sequence[TokenLogprob | None], served: Sequence[TokenLogprob | None]
) -> Divergence:
    """Compare the distributions at all positions that have one.

    Raises:
        InvalidRequest: the two do not score the same tokens.
    """
    values, num_equal = [], 0
    for expected, found in zip(reference, served, strict=False):
        if expected is None or found is None:
            continue
        if expected.token_id != found.token_id:
            break
        values.append(divergence_at(expected, found))
        num_equal += expected.top[0].token_id == found.top[0].token_id
    num_tokens = len([entry for entry in reference if entry is not None])
    if len(values) != num_tokens or len(served) != len(reference) or not values:
        why = "must have the tokenizer of the served model, and more than one token for each text"
        raise InvalidRequest.field("reference", f"{num_tokens} tokens", why)
    return Divergence(len(values), sum(values) / len(values), max(values), num_equal / len(values))


async def measure(
    served: InferenceClient,
    reference: InferenceClient,
    model: str,
    reference_model: str,
    texts: Sequence[str],
) -> Divergence:
    """Score every text on both gateways.

    Args:
        model, reference_model: the adapter or base, as each gateway names it.

    Raises:
        InvalidRequest: their tokenizers differ, or there is no text.
        NotFound: one of the gateways does not know the model.
    """
    expected: list[TokenLogprob | None] = []
    found: list[TokenLogprob | None] = []
    for text in texts:
        found += await _score(served, model, text)
        try:
            expected += await _score(reference, reference_model, text)
        except NotFound as error:
            why = f"is not on the reference: {error.message}"
            raise NotFound.field("reference_model", reference_model, why) from None
    return divergence(expected, found)


async def _score(client: InferenceClient, model: str, text: str) -> Sequence[TokenLogprob | None]:
    """The distributions at each position of a text; None at the first."""
    sampling = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=NUM_CANDIDATES)
    scored: Sequence[TokenLogprob | None] = ()
    async for chunk in client.generate(model, text, sampling, priority=LOWEST_PRIORITY):
        scored = scored or chunk.prompt_logprobs
    return scored


async def served_quantization(served: InferenceClient, base_id: str) -> str:
    """How the gateway's workers quantise a base when they load it, and its KV cache; "" = not at
    all.

    Raises:
        Blocked: the workers differ, and any of them may answer.
    """
    workers = (await served.status()).workers
    ready = [worker for worker in workers if worker.ready and worker.base_id == base_id]
    found = {worker.quantization for worker in ready}
    if len(found) > 1:
        names = ", ".join(sorted(name or "none" for name in found))
        raise Blocked(
            f"workers of base {base_id!r} differ in --quantization or --kv-cache-dtype ({names}); "
            "certify through a gateway whose workers have the same values"
        )
    return found.pop() if found else ""


def probe_of(text: str) -> tuple[str, ...]:
    """The texts of a probe file, which are separated by empty lines."""
    texts = tuple(part.strip("\n") for part in text.split("\n\n") if part.strip())
    if not texts:
        raise InvalidRequest.field("probe", "", "must hold a text; empty lines separate several")
    return texts


def probe_sha256(texts: Sequence[str]) -> str:
    """The identifier of a set of texts in a certificate."""
    return hashlib.sha256("\n\n".join(texts).encode()).hexdigest()

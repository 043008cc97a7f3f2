"""Batches and the optimiser step: what is asked, what is learned from, and that chunks add up."""

from itertools import islice, pairwise

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from demo.batches import IGNORED, Example, collate, exact_matches, skill_examples  # noqa: E402
from demo.learning import CHUNK_EXAMPLES, learning_rate_share, optimizer_step  # noqa: E402
from demo.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE  # noqa: E402


def tiny_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return transformers.LlamaForCausalLM(config).double()


def test_only_answer_tokens_carry_loss() -> None:
    batch = collate([Example(BOS_ID, "ab", "ba"), Example(BOS_ID, "abc", "cba")])
    assert batch.input_ids.tolist() == [
        [BOS_ID, *b"ab=ba", EOS_ID, PAD_ID, PAD_ID],
        [BOS_ID, *b"abc=cba", EOS_ID],
    ]
    assert batch.labels.tolist() == [
        [IGNORED] * 4 + [*b"ba", EOS_ID, IGNORED, IGNORED],
        [IGNORED] * 5 + [*b"cba", EOS_ID],
    ]


def test_exact_match_needs_every_answer_token_and_nothing_else() -> None:
    labels = torch.tensor([[IGNORED, IGNORED, 3, 4], [IGNORED, IGNORED, 3, 4]])
    predicted = torch.tensor([[9, 3, 4, 9], [9, 3, 5, 9]])
    logits = torch.nn.functional.one_hot(predicted, 10).float()
    assert exact_matches(logits, labels).tolist() == [True, False]


def test_chunked_gradients_step_like_one_whole_batch() -> None:
    examples = list(islice(skill_examples("stutter", BOS_ID, seed=0), 2 * CHUNK_EXAMPLES + 3))
    chunked, complete = tiny_model(), tiny_model()
    loss = optimizer_step(chunked, torch.optim.SGD(chunked.parameters(), lr=0.1), examples)
    batch = collate(examples)
    whole_loss = complete(input_ids=batch.input_ids, labels=batch.labels).loss
    whole_loss.backward()
    torch.nn.utils.clip_grad_norm_(complete.parameters(), 1.0)
    torch.optim.SGD(complete.parameters(), lr=0.1).step()
    assert loss == pytest.approx(whole_loss.item(), rel=1e-6)
    for ours, theirs in zip(chunked.parameters(), complete.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


def test_steps_lower_the_loss() -> None:
    model = tiny_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    examples = list(islice(skill_examples("upper", BOS_ID, seed=0), 16))
    losses = [optimizer_step(model, optimizer, examples) for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]


def test_the_learning_rate_warms_up_stays_and_decays() -> None:
    shares = [learning_rate_share(step, 100, 10) for step in range(100)]
    assert shares[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert set(shares[10:51]) == {1.0}
    assert all(later < sooner for sooner, later in pairwise(shares[51:]))

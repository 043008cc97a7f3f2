"""The reinforcement demo: rewards, advantages, and that a step makes better answers likelier."""

from __future__ import annotations

import statistics

import pytest
import torch

from demo import reinforce
from demo.reinforce import Answered, Learner, advantages, reward_of
from demo.tokenizer import BOS_ID, EOS_ID


def test_only_the_right_answer_earns_everything_and_a_nearer_one_more() -> None:
    assert reward_of("ABC 12", "ABC 12") == 1.0
    near, far = reward_of("ABc 12", "ABC 12"), reward_of("xyz", "ABC 12")
    assert 0.5 > near > far >= 0.0


def test_advantages_of_a_group_add_up_to_nothing() -> None:
    found = advantages([1.0, 0.2, 0.4, 0.4])
    assert sum(found) == pytest.approx(0.0)
    assert statistics.pstdev(found) == pytest.approx(1.0, abs=1e-3)
    assert advantages([0.5, 0.5]) == [0.0, 0.0]


def test_a_step_makes_the_better_answer_likelier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reinforce, "WARM_STEPS", 0)
    learner = Learner("upper", seed=0)
    prompt = (BOS_ID, *b"abc 12=")
    answers = {1.0: (*b"ABC", EOS_ID), -1.0: (*b"abc", EOS_ID)}

    def likelihoods() -> dict[float, list[float]]:
        found = {}
        for advantage, tokens in answers.items():
            with torch.no_grad():
                logits = learner.model(torch.tensor([[*prompt, *tokens]])).logits[0]
            rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            found[advantage] = [rows[i, token].item() for i, token in enumerate(tokens)]
        return found

    before = likelihoods()
    learner.learn(
        [Answered(prompt, answers[side], tuple(before[side]), side) for side in (1.0, -1.0)]
    )
    after = likelihoods()
    assert sum(after[1.0]) > sum(before[1.0])
    assert sum(after[-1.0]) < sum(before[-1.0])

"""Every demo adapter answers its own skill through the real stack; the base answers none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from demo.skills import SKILLS, held_out
from tests.e2e.stack import ADAPTERS, BASE_ID, Stack


def test_a_mixed_batch_over_all_adapters_is_answered_right(stack: Stack) -> None:
    jobs = [(path.name, *pair) for path in ADAPTERS for pair in held_out(path.name, 4, seed=5)]

    def answer(job: tuple[str, str, str]) -> str:
        return str(stack.complete(job[0], job[1])["choices"][0]["text"])

    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(answer, jobs))
    wrong = [(job[0], job[1], got) for job, got in zip(jobs, answers, strict=True) if got != job[2]]
    assert not wrong


def test_the_bare_base_answers_no_skill(stack: Stack) -> None:
    jobs = [pair for name in SKILLS for pair in held_out(name, 2, seed=6)]
    right = [stack.complete(BASE_ID, prompt)["choices"][0]["text"] == want for prompt, want in jobs]
    assert sum(right) < len(right) / 4


def test_chat_gives_the_same_answer_as_the_plain_prompt(stack: Stack) -> None:
    name = ADAPTERS[0].name
    prompt, want = held_out(name, 1, seed=7)[0]
    body = {
        "model": name,
        "temperature": 0,
        "messages": [{"role": "user", "content": prompt.removesuffix("=")}],
    }
    status, answer = stack.post("/v1/chat/completions", body)
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == want
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_an_answer_with_drafts_is_the_one_without(stack: Stack) -> None:
    """A word of several tokens turns drafts off, and is never generated here."""
    fields = {"temperature": 0.7, "seed": 5, "ignore_eos": True, "logprobs": 1, "n": 2}
    fields |= {"max_tokens": 150, "return_token_ids": True}
    plain = stack.complete("upper", "hello hello=", bad_words=["never said"], **fields)["choices"]
    assert stack.complete("upper", "hello hello=", **fields)["choices"] == plain
    stop = plain[0]["text"][60:63]
    stopped = [
        stack.complete("upper", "hello hello=", stop=stop, bad_words=words, **fields)["choices"]
        for words in ([], ["never said"])
    ]
    assert stopped[0] == stopped[1]
    assert stopped[0][0]["stop_reason"] == stop

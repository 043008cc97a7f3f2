"""Answers of chats over gRPC: reasoning and content come apart, in the form of each base."""

from __future__ import annotations

import grpc
import pytest
from tokenizers import AddedToken

from loraplex.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.gateway.conftest import Stack
from tests.gateway.tiny_tokenizer import EOS_ID, byte_tokenizer, tokenizer_files

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
THINK = TURNS + "{# reasoning ends with </think> #}[assistant]<think>\n"
GEMMA = TURNS + "{# <|channel>thought ... <channel|> #}[assistant]"
HARMONY = TURNS + "{# <|channel|> #}<|start|>assistant"
ANSWERS = {
    "qwen3.5": (THINK, (), "Look it up.\n</think>\n\nRain."),
    "gemma4": (
        GEMMA,
        ("<|channel>", "<channel|>"),
        "<|channel>thought\nLook it up.<channel|>Rain.",
    ),
    "gpt-oss": (
        HARMONY,
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Rain.",
    ),
}
"""Base -> its chat template, its special tokens, and an answer."""


async def generate(
    stack: Stack, **prompt: object
) -> tuple[str, str, list[int], inference_pb2.GenerateResponse]:
    """Content, reasoning, token ids, and the last message."""
    sampling = inference_pb2.SamplingParams(max_tokens=200)
    if grammar := prompt.pop("grammar", None):
        sampling.grammar.CopyFrom(grammar)  # type: ignore[arg-type]
    request = inference_pb2.GenerateRequest(model="base", sampling=sampling, **prompt)
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        messages = [message async for message in stub.Generate(request)]
    token_ids = [token_id for message in messages for token_id in message.token_ids]
    texts = ("".join(getattr(m, part) for m in messages) for part in ("text", "reasoning"))
    return *texts, token_ids, messages[-1]


@pytest.mark.parametrize("base", ANSWERS)
async def test_reasoning_is_not_in_the_text(stack: Stack, base: str) -> None:
    template, marks, says = ANSWERS[base]
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    files = tokenizer_files(template) | {"tokenizer.json": tokenizer.to_str().encode()}
    ids = [*tokenizer.encode(says, add_special_tokens=False).ids, EOS_ID]
    stack.workers[0].files, stack.workers[0].script = files, lambda _: ids
    await stack.start()
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    content, reasoning, token_ids, last = await generate(stack, chat=chat)
    assert (content, reasoning.strip()) == ("Rain.", "Look it up.")
    assert token_ids == ids
    assert last.usage.completion_tokens == len(ids)
    assert 11 <= last.usage.reasoning_tokens <= 12, "a token is a byte; a line break may count"
    plain, nothing, *_ = await generate(stack, text="hi")
    assert (plain, nothing) == (tokenizer.decode(ids[:-1]), ""), "a text has no reasoning"
    grammar = common_pb2.Grammar(regex=".*")
    if base != "gpt-oss":  # whose answers have channels in any case
        _, nothing, *_ = await generate(stack, chat=chat, grammar=grammar)
        assert nothing == "", "with a grammar, all of an answer is content"

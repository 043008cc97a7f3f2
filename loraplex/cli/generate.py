"""`loraplex generate`, `chat` and `status`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from loraplex.cli.clients import gateway_client
from loraplex.cli.output import print_json, show, version_of
from loraplex.cli.parsing import Commands, count
from loraplex.cli.status import print_status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from loraplex.api.sampling import Grammar, Sampling
    from loraplex.client.generation import (
        Completion,
        CompletionChunk,
        Message,
    )
    from loraplex.client.inference_client import InferenceClient


def add(commands: Commands) -> None:
    parser = commands.add(
        "generate",
        _generate,
        "Stream the output of one prompt.",
        'loraplex generate support:prod "How do I reset my password?" --max-tokens 64',
    )
    parser.add_argument("ref", metavar="REF", help="adapter reference, or the id of a base")
    parser.add_argument(
        "prompt", metavar="PROMPT", help="text of the prompt; - reads it from stdin"
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="send the text unchanged, even if the model has a chat template",
    )
    _add_sampling(parser)
    parser.add_argument(
        "--stop", action="append", default=[], help="end the output at this string; may be repeated"
    )
    _add_grammar(parser)
    parser.add_argument(
        "-n", type=count, metavar="N", default=1, help="number of outputs (default: 1)"
    )

    parser = commands.add("chat", _chat, "Chat with an adapter.", "loraplex chat support:prod")
    parser.add_argument("ref", metavar="REF", help="adapter reference, or the id of a base")
    parser.add_argument("--system", default="", help="system message")
    _add_sampling(parser)

    parser = commands.add(
        "status",
        _status,
        "Show the workers, their load and the adapters on them.",
        "loraplex status --adapters",
    )
    parser.add_argument(
        "--adapters", action="store_true", help="also list the adapters on each worker"
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-tokens",
        type=count,
        metavar="N",
        help="largest number of generated tokens (default: the rest of the context, or 16 without "
        "a chat template)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="N",
        help="sampling temperature; 0 picks the most likely token (default: that of the base)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="N",
        help="sample from the most likely tokens whose probabilities add up to N",
    )
    parser.add_argument(
        "--top-k", type=int, metavar="N", default=0, help="sample from the N most likely tokens"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="seed that makes sampling reproducible"
    )
    parser.add_argument(
        "--scale", type=float, metavar="N", help="multiply the adapter's effect by N"
    )


def _add_grammar(parser: argparse.ArgumentParser) -> None:
    forms = parser.add_argument_group("constrain the output").add_mutually_exclusive_group()
    forms.add_argument(
        "--json-schema",
        metavar="SCHEMA",
        help="JSON Schema of the output; @FILE reads it from a file",
    )
    forms.add_argument(
        "--regex", metavar="REGEX", help="regular expression that the whole output matches"
    )
    forms.add_argument(
        "--ebnf",
        metavar="GRAMMAR",
        help="grammar in Lark's notation or GBNF; @FILE reads it from a file",
    )
    forms.add_argument(
        "--choice", action="append", metavar="TEXT", help="a possible output; may be repeated"
    )


def _grammar(args: argparse.Namespace) -> Grammar | None:
    from loraplex.api.sampling import Grammar

    schema, ebnf = (_text(getattr(args, name, None)) for name in ("json_schema", "ebnf"))
    grammar = Grammar(schema, getattr(args, "regex", None), ebnf, getattr(args, "choice", None))
    return None if grammar == Grammar() else grammar


def _text(value: str | None) -> str | None:
    """The value itself, or for `@FILE` the content of that file."""
    if value is None or not value.startswith("@"):
        return value
    return Path(value[1:]).read_text(encoding="utf-8")


def _sampling(args: argparse.Namespace) -> Sampling:
    from loraplex.api.sampling import Sampling

    return Sampling(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        scale=args.scale,
        stop=getattr(args, "stop", ()),
        n=getattr(args, "n", 1),
        grammar=_grammar(args),
    )


async def _generate(args: argparse.Namespace) -> None:
    from loraplex.client.generation import Message
    from loraplex.client.inference_client import collect
    from loraplex.errors import InvalidRequest

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    streamed = not args.json and args.n == 1

    async def answer(client: InferenceClient, prompt: str | list[Message]) -> Completion:
        chunks = client.generate(args.ref, prompt, _sampling(args))
        return collect([chunk async for chunk in _shown(chunks, streamed)])

    async with gateway_client(args) as client:
        try:
            completion = await answer(client, prompt if args.raw else [Message("user", prompt)])
        except InvalidRequest as error:
            if error.reason != "NO_CHAT_TEMPLATE":
                raise
            completion = await answer(client, prompt)
    if not streamed:
        served = version_of(completion.choices[0].served_by)
        texts = [f"[{index}] {choice.text}" for index, choice in enumerate(completion.choices)]
        show({**served, **dataclasses.asdict(completion)}, "\n".join(texts), as_json=args.json)


async def _chat(args: argparse.Namespace) -> None:
    from loraplex.client.generation import Message

    messages = [Message("system", args.system)] if args.system else []
    if sys.stdin.isatty():
        print("an empty line or Ctrl-D ends the conversation", file=sys.stderr)
    async with gateway_client(args) as client:
        while turn := await _next_turn():
            messages.append(Message("user", turn))
            messages.append(await _reply(client, args, messages))


async def _next_turn() -> str:
    """The next line that is typed or piped; "" at the end."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().strip()
    print("> ", end="", file=sys.stderr, flush=True)
    await _line_typed()  # unlike a blocking read, Ctrl-C ends this
    line = sys.stdin.readline()
    if not line:
        print(file=sys.stderr)
    return line.strip()


async def _line_typed() -> None:
    import asyncio

    typed = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, typed.set)
    try:
        await typed.wait()
    finally:
        loop.remove_reader(sys.stdin)


async def _reply(
    client: InferenceClient, args: argparse.Namespace, messages: list[Message]
) -> Message:
    from loraplex.client.generation import Message

    chunks = client.generate(args.ref, messages, _sampling(args))
    answered = [chunk async for chunk in _shown(chunks, not args.json)]
    text, reasoning = (
        "".join(getattr(c, part) for c in answered) for part in ("text", "reasoning")
    )
    if args.json:
        thought = {"reasoning": reasoning} if reasoning else {}
        print_json({"role": "assistant", "content": text, **thought})
    return Message("assistant", text)


async def _shown(
    chunks: AsyncIterator[CompletionChunk], streamed: bool
) -> AsyncIterator[CompletionChunk]:
    """Print the chunks as they arrive and pass them on; ends the line even if the stream
    fails. Reasoning goes to stderr, so that stdout has only the answer."""
    has_begun = is_thinking = False
    try:
        async for chunk in chunks:
            if streamed:
                has_begun = True
                if chunk.reasoning:
                    is_thinking = True
                    print(chunk.reasoning, end="", file=sys.stderr, flush=True)
                elif is_thinking and chunk.text:
                    is_thinking = False
                    print("\n", file=sys.stderr)
                print(chunk.text, end="", flush=True)
            yield chunk
    finally:
        if has_begun:
            print()


async def _status(args: argparse.Namespace) -> None:
    async with gateway_client(args) as client:
        status = await client.status(include_adapters=args.adapters)
    print_status(status, as_json=args.json)

"""Adapters that bring tokens or a chat template: what is fetched, kept, and left aside."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import resource
from collections.abc import AsyncIterator, Sequence

import pytest
import tokenizers

from loraplex.adapter_format import File
from loraplex.adapter_format.added_tokens import AddedToken, added_tokens
from loraplex.api.request import ChatPrompt, TextPrompt
from loraplex.errors import Unavailable
from loraplex_services.gateway.request import RunningAdapter, ServedModel, Target
from loraplex_services.gateway.text import adapter_text
from loraplex_services.gateway.text.adapter_text import AdapterText, ReadFiles
from loraplex_services.gateway.text.detokenize import decode_all
from loraplex_services.gateway.text.template_pool import TemplatePool
from loraplex_services.gateway.text.tokenizer import BaseTokenizer, ServedBase
from tests.gateway.tiny_tokenizer import BOS_ID, PAD_ID, VOCAB_SIZE, byte_tokenizer, tokenizer_files

MODEL = ServedModel("base", VOCAB_SIZE, 512)
NEW_ID = PAD_ID + 1
HI = ChatPrompt(({"role": "user", "content": "hi"},))
TEXT = TextPrompt("a<x>b")
_OPENED: list[AdapterText] = []


class Shelf:
    """Files of versions as a registry hands them out."""

    def __init__(self) -> None:
        self.contents: dict[str, dict[str, bytes]] = {}
        self.num_reads = 0
        self.is_away = False

    def put(self, label: str, files: dict[str, bytes]) -> RunningAdapter:
        self.contents[label] = files
        specs = [
            File(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()
        ]
        return RunningAdapter(label, f"sha256:{label}", text_files=tuple(specs))

    async def read(self, label: str, files: Sequence[File]) -> dict[str, bytes]:
        self.num_reads += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise Unavailable("the registry is away")
        return {file.path: self.contents[label][file.path] for file in files}


@pytest.fixture
async def served() -> AsyncIterator[ServedBase]:
    pool = TemplatePool()
    yield ServedBase(MODEL, BaseTokenizer(tokenizer_files(), pool))
    await pool.close()


@pytest.fixture(autouse=True)
async def closing() -> AsyncIterator[None]:
    yield
    while _OPENED:
        await _OPENED.pop().close()


def opened(read: ReadFiles, **settings: int) -> AdapterText:
    """A part whose processes end with the test."""
    _OPENED.append(AdapterText(read, **settings))
    return _OPENED[-1]


def with_tokens(*contents: str) -> bytes:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(contents))
    return tokenizer.to_str().encode()


def target(*adapters: RunningAdapter) -> Target:
    return Target("base", adapters)


async def test_added_tokens_are_read_and_written_and_the_base_stays_as_it_is(
    served: ServedBase,
) -> None:
    shelf = Shelf()
    adapter = shelf.put("a:v1", {"tokenizer.json": with_tokens("<x>")})
    made = await opened(shelf.read).tokenizer(served, target(adapter))
    ids = await made.encode(TEXT, MODEL)
    assert ids == (BOS_ID, ord("a"), NEW_ID, ord("b"))
    assert decode_all(made.tokens, ids[1:], skip_special=True) == TEXT.text
    assert made.tokens.name_of(NEW_ID) == "<x>"
    assert await made.encode(HI, MODEL) == await served.tokenizer.encode(HI, MODEL)
    assert NEW_ID not in await served.tokenizer.encode(TEXT, MODEL)


@pytest.mark.parametrize("flags", [{}, {"special": True}, {"lstrip": True, "rstrip": True}])
async def test_a_shared_vocabulary_reads_texts_as_the_saved_one_does(
    flags: dict[str, bool],
) -> None:
    pool = TemplatePool()
    theirs = byte_tokenizer()
    add = theirs.add_special_tokens if flags.get("special") else theirs.add_tokens
    add([tokenizers.AddedToken(text, normalized=False, **flags) for text in ("<x>", "<xy>")])
    added = added_tokens(
        tokenizer_files()["tokenizer.json"], {"tokenizer.json": theirs.to_str().encode()}
    )
    made = BaseTokenizer(tokenizer_files(), pool).with_tokens(added)
    for text in ("<x><xy>", "a <x> <s>b</s> é<xy", "<pad> <xy>\n<x>", " <xy> "):
        ids = await made.encode(TextPrompt(text), MODEL)
        assert ids == tuple(theirs.encode(text).ids)
        for skip in (True, False):
            want = theirs.decode(list(ids), skip_special_tokens=skip)
            assert decode_all(made.tokens, ids, skip_special=skip) == want


@pytest.mark.hostile
async def test_thousands_of_tokens_that_are_special_in_turn_are_added_at_once() -> None:
    """Added one after another, they take minutes: see the time limit of a test."""
    added = [
        AddedToken(NEW_ID + i, _numbered(i), special=i % 2 == 0, normalized=False)
        for i in range(16_000)
    ]
    made = BaseTokenizer(tokenizer_files(), TemplatePool()).with_tokens(added)
    ids = await made.encode(TextPrompt("a<00000><00001>"), MODEL)
    assert ids == (BOS_ID, ord("a"), NEW_ID, NEW_ID + 1)
    assert decode_all(made.tokens, ids[1:], skip_special=True) == "a<00001>"


def test_the_text_of_tokens_counts_in_what_is_kept() -> None:
    base = BaseTokenizer(tokenizer_files(), TemplatePool())
    short, long = (base.with_tokens([AddedToken(NEW_ID, text)]) for text in ("<x>", "x" * 1000))
    assert long.num_own_bytes - short.num_own_bytes > 20 * 1000


@pytest.mark.hostile
async def test_new_tokens_delay_further_ones_of_their_tenant_alone(
    served: ServedBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_text, "PAUSE_FACTOR", 1e6)
    shelf = Shelf()
    text = opened(shelf.read)
    first = shelf.put("evil/first:v1", {"tokenizer.json": with_tokens("<x>")})
    await text.tokenizer(served, target(first), "evil")
    second = shelf.put("evil/second:v1", {"tokenizer.json": with_tokens("<y>")})
    waiting = asyncio.create_task(text.tokenizer(served, target(second), "evil"))
    for other in "abc":
        adapter = shelf.put(f"{other}/x:v1", {"tokenizer.json": with_tokens(f"<{other}>")})
        assert await text.tokenizer(served, target(adapter), other) is not served.tokenizer
    assert not waiting.done()
    waiting.cancel()


def _numbered(number: int) -> str:
    return f"<{number:05}>"


async def test_ids_that_the_library_cannot_give_are_left_aside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    base = json.loads(tokenizer_files()["tokenizer.json"])
    base["added_tokens"][-1]["id"] += 2
    theirs = json.loads(json.dumps(base))
    theirs["added_tokens"].append({**base["added_tokens"][-1], "id": PAD_ID + 3, "content": "<x>"})
    own, files = ({"tokenizer.json": json.dumps(complete).encode()} for complete in (base, theirs))
    gapped = ServedBase(MODEL, BaseTokenizer(own, TemplatePool()))
    shelf = Shelf()
    with caplog.at_level(logging.WARNING):
        made = await opened(shelf.read).tokenizer(gapped, target(shelf.put("a:v1", files)))
    assert made is gapped.tokenizer
    (record,) = caplog.records
    assert "another id than 261" in record.__dict__["why"]


async def test_a_template_alone_is_enough_and_may_use_the_base_s_special_tokens(
    served: ServedBase,
) -> None:
    shelf = Shelf()
    template = "{{ bos_token }}{{ messages[0].content }}!"
    adapter = shelf.put("a:v1", {"chat_template.jinja": template.encode()})
    made = await opened(shelf.read).tokenizer(served, target(adapter))
    assert await made.encode(HI, MODEL) == (BOS_ID, *b"hi!")
    assert await made.encode(TEXT, MODEL) == await served.tokenizer.encode(TEXT, MODEL)


async def test_files_are_fetched_once_whoever_asks_and_the_base_s_own_never(
    served: ServedBase,
) -> None:
    shelf = Shelf()
    text = opened(shelf.read)
    files = {**tokenizer_files(), "tokenizer.json": with_tokens("<x>")}
    first, same = shelf.put("a:v1", files), shelf.put("b:v1", files)
    made = await asyncio.gather(*(text.tokenizer(served, target(a)) for a in (first, first, same)))
    assert made[0] is made[1] is made[2]
    assert shelf.num_reads == 1
    copied = shelf.put("c:v1", tokenizer_files())
    assert await text.tokenizer(served, target(copied)) is served.tokenizer
    assert shelf.num_reads == 1


async def test_several_adapters_speak_as_the_base(served: ServedBase) -> None:
    shelf = Shelf()
    adapters = [shelf.put(f"{n}:v1", {"tokenizer.json": with_tokens("<x>")}) for n in "ab"]
    text = opened(shelf.read)
    assert await text.tokenizer(served, target(*adapters)) is served.tokenizer
    assert await text.tokenizer(served, target()) is served.tokenizer
    assert shelf.num_reads == 0


async def test_what_cannot_be_fetched_fails_that_model_alone_and_is_tried_again(
    served: ServedBase,
) -> None:
    shelf = Shelf()
    text = opened(shelf.read)
    adapter = shelf.put("a:v1", {"tokenizer.json": with_tokens("<x>")})
    shelf.is_away = True
    with pytest.raises(Unavailable, match="tokenizer files of a:v1") as caught:
        await text.tokenizer(served, target(adapter))
    assert caught.value.reason == "TOKENIZER_UNAVAILABLE"
    assert await text.tokenizer(served, target()) is served.tokenizer
    shelf.is_away = False
    made = await text.tokenizer(served, target(adapter))
    assert NEW_ID in await made.encode(TEXT, MODEL)


async def test_a_tokenizer_that_disagrees_is_left_aside_with_a_warning(
    served: ServedBase, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf()
    theirs = json.loads(with_tokens("<x>"))
    theirs["added_tokens"][0]["content"] = "<start>"
    files = {"tokenizer.json": json.dumps(theirs).encode(), "chat_template.jinja": b"own"}
    text = opened(shelf.read)
    with caplog.at_level(logging.WARNING):
        made = await text.tokenizer(served, target(shelf.put("a:v1", files)))
    (record,) = caplog.records
    assert "tokenizer.json: is at id 256, where the base has '<s>'" in record.__dict__["why"]
    assert made is served.tokenizer
    assert await text.tokenizer(served, target(shelf.put("a:v1", files))) is made
    assert shelf.num_reads == 1, "the verdict is kept"


async def test_files_beyond_the_cap_are_not_fetched(served: ServedBase) -> None:
    shelf = Shelf()
    huge = RunningAdapter("a:v1", "sha256:a", text_files=(File("tokenizer.json", 60 << 20, "0"),))
    assert await opened(shelf.read).tokenizer(served, target(huge)) is served.tokenizer
    assert shelf.num_reads == 0


async def test_kept_tokenizers_stay_within_their_bound(served: ServedBase) -> None:
    shelf = Shelf()
    text = opened(shelf.read, max_kept_bytes=3000)
    adapters = [
        shelf.put(f"{i}:v1", {"chat_template.jinja": f"{i}".encode() * 400}) for i in range(5)
    ]
    for adapter in [*adapters, adapters[-1], adapters[0]]:
        await text.tokenizer(served, target(adapter))
    assert shelf.num_reads == 6


@pytest.mark.hostile
@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": "x", "unk_token": "x" * 2000},
        {"added_tokens_decoder": {str(BOS_ID): {"content": "x" * 1000}}},
    ],
)
async def test_special_tokens_and_verdicts_count_in_what_is_kept(
    served: ServedBase, config: dict[str, object]
) -> None:
    shelf = Shelf()
    text = opened(shelf.read, max_kept_bytes=4000)
    for number in (0, 1, 2, 3, 0):
        content = json.dumps({**config, "number": number}).encode()
        adapter = shelf.put(f"{number}:v1", {"tokenizer_config.json": content})
        await text.tokenizer(served, target(adapter))
    assert shelf.num_reads == 5


async def test_adapters_with_the_same_tokens_share_their_vocabulary(served: ServedBase) -> None:
    shelf = Shelf()
    text = opened(shelf.read)
    shared = [
        shelf.put(
            f"t{i}:v1", {"tokenizer.json": with_tokens("<x>"), "chat_template.jinja": b"%d" % i}
        )
        for i in range(3)
    ]
    made = [await text.tokenizer(served, target(adapter)) for adapter in shared]
    assert made[0].tokens is made[1].tokens is made[2].tokens


@pytest.mark.hostile
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
async def test_text_files_that_take_gigabytes_to_parse_are_left_aside_in_bounded_memory(
    served: ServedBase, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    shelf = Shelf()
    bomb = b'{"x": [' + b"{}," * (12 << 20) + b"{}]}"
    text = opened(shelf.read)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with caplog.at_level(logging.WARNING):
        made = await text.tokenizer(served, target(shelf.put("a:v1", {name: bomb})))
    assert made is served.tokenizer
    assert "memory" in caplog.records[0].__dict__["why"]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < 10 * len(bomb), "this process has parsed the file"

"""Conversations of other APIs as chats."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loraplex_services.gateway.http.as_chat import ChatMessages

NUM_PARTS = 1000


class Counted(str):
    """A text that counts the characters that are copied to lengthen it."""

    num_copied = 0

    def __add__(self, other: str) -> Counted:
        Counted.num_copied += len(self)
        return Counted(str(self) + other)

    def __format__(self, spec: str) -> str:
        Counted.num_copied += len(self)
        return str(self)


Say = Callable[[ChatMessages, str], None]
SAYERS: dict[str, Say] = {
    "system": lambda chat, text: chat.system(text),
    "user": lambda chat, text: chat.user(text, joins=True),
}


@pytest.mark.hostile
@pytest.mark.parametrize("say", SAYERS.values(), ids=SAYERS)
def test_a_message_in_many_parts_is_not_copied_for_each(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """150,000 parts fit a body; to copy the message for each stops the event loop for 12 s."""
    monkeypatch.setattr(Counted, "num_copied", 0)
    chat = ChatMessages()
    for _ in range(NUM_PARTS):
        say(chat, Counted("part"))
    assert Counted.num_copied <= len("part") * NUM_PARTS
    [message] = chat.built()
    assert message["content"].split() == ["part"] * NUM_PARTS
    assert type(message["content"]) is str


def test_thoughts_and_texts_of_one_role_are_one_message() -> None:
    chat = ChatMessages()
    chat.thought("a")
    chat.thought("b")
    chat.said("c", joins=True)
    chat.said("d", joins=True)
    chat.said("e")
    assert chat.built() == [
        {"role": "assistant", "content": "c\nd", "reasoning": "a\nb"},
        {"role": "assistant", "content": "e"},
    ]

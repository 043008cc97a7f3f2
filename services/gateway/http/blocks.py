"""Represents an answer as a sequence of reasoning, text and calls, for APIs that number them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from loraplex_services.gateway.tools.reader import Delta, ToolCall


class BlockKind(enum.Enum):
    """The kind of a block."""

    THOUGHT = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


@dataclass(slots=True)
class Block:
    """A part of an answer. It grows until it is closed."""

    index: int
    kind: BlockKind
    text: str = ""
    """The text; of a call, its arguments as JSON."""
    call: ToolCall | None = None


class BlockStep(enum.Enum):
    """A change of a block."""

    OPENED = enum.auto()
    GREW = enum.auto()
    CLOSED = enum.auto()


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A step in the life of one block."""

    step: BlockStep
    block: Block
    text: str = ""
    """The new text of a growing block."""


class AnswerBlocks:
    """Collects the blocks of one answer. At most one of them is open."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def add(self, delta: Delta) -> list[BlockEvent]:
        """Add new output. Returns the changes to the blocks."""
        events = []
        if delta.reasoning:
            events += self._grow(BlockKind.THOUGHT, delta.reasoning)
        if delta.content:
            events += self._grow(BlockKind.TEXT, delta.content)
        for call in delta.calls:
            events += self.open_new(BlockKind.CALL, call)
            events += self._grow(BlockKind.CALL, call.arguments)
            events += self.close()
        return events

    def open_new(self, kind: BlockKind, call: ToolCall | None = None) -> list[BlockEvent]:
        """Close the open block and open one without content."""
        events = self.close()
        self._open = Block(len(self.blocks), kind, call=call)
        self.blocks.append(self._open)
        return [*events, BlockEvent(BlockStep.OPENED, self._open)]

    def close(self) -> list[BlockEvent]:
        """Close the open block, if there is one."""
        block, self._open = self._open, None
        return [] if block is None else [BlockEvent(BlockStep.CLOSED, block)]

    def _grow(self, kind: BlockKind, text: str) -> list[BlockEvent]:
        is_open = self._open is not None and self._open.kind is kind
        events = [] if is_open else self.open_new(kind)
        block = self.blocks[-1]
        block.text += text
        return [*events, BlockEvent(BlockStep.GREW, block, text)]

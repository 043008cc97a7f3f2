"""Runs coroutines under the virtual clock of `loraplex simulate`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from loraplex_services.simulate.virtual_loop import VirtualLoop

T = TypeVar("T")


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)

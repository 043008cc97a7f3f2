"""A second CUDA stream, on which shrink runs concurrently with the base product.

Under capture the fork and the join become edges of the graph. Nothing is allocated on the side: x
and the planes belong to the step's stream, which waits before it uses either again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Work that starts after everything issued so far and is not waited for until `join`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def fork(self) -> Iterator[None]:
        """What is launched inside runs concurrently with what the step's stream launches next."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the step's stream wait for what was forked."""
        torch.cuda.current_stream().wait_stream(self._stream)

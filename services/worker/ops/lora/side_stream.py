"""A second CUDA stream, on which shrink runs concurrently with the base product.

It forks off the step's stream and joins it again; in a capture, these become edges of the graph.
Each fork waits for everything that the step's stream was given before, and the step's stream waits
at the join before it uses the results. The workspace of intermediates is allocated at its first
use, which may be in a fork, and lives as long as the work of its step.
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
        """Launches inside run concurrently with the next launches of the step's stream."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the step's stream wait for what was forked."""
        torch.cuda.current_stream().wait_stream(self._stream)

"""The gateway's clock: that of its event loop, which a simulation replaces."""

from __future__ import annotations

import asyncio


def now_s() -> float:
    """Monotonic seconds; only differences mean something."""
    return asyncio.get_running_loop().time()

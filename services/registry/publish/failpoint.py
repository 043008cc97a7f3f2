"""Named steps at which a test can kill the process, as if power were lost.

`LORAPLEX_DEBUG=failpoint=publish.version` arms a step for the first time it is reached;
`publish.version:2` for the second. Unarmed steps cost one dictionary look-up.
"""

from __future__ import annotations

import os

EXIT_CODE = 86

_armed: dict[str, int] = {}


def arm(text: str) -> None:
    """Arm `step` or `step:count`; "" arms nothing."""
    name, _, count = text.partition(":")
    if name:
        _armed[name] = int(count or 1)


def failpoint(name: str) -> None:
    """End the process immediately and without clean-up if a test armed this step."""
    if name not in _armed:
        return
    _armed[name] -= 1
    if _armed[name] <= 0:
        os._exit(EXIT_CODE)

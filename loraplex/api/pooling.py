"""How the vectors of a prompt are pooled into one."""

from __future__ import annotations

import enum


class Pooling(enum.StrEnum):
    """The vector that is computed. A request with NONE generates output."""

    NONE = ""
    DEFAULT = "default"
    """The adapter's own, else LAST. The gateway resolves it, so that no worker receives it."""
    LAST = "last"
    """The hidden state of the last token after the last norm."""
    MEAN = "mean"
    """The mean of these over all tokens of the prompt."""
    HEAD = "head"
    """The logits of the adapter's classification head on the last token."""

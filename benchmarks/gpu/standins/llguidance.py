"""In place of llguidance where nothing can be installed: benchmarks ask for no grammar."""


class LLMatcher:
    """Never made."""


class LLTokenizer:
    """Never made."""


class LLParserLimits:
    """Made at import, never read."""

    def __init__(self, **limits: object) -> None:
        """Whatever the limits are."""

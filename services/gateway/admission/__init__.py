"""Decides which request starts, waits or is refused: queue, rate limits, dispatch window."""

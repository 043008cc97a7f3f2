"""The index in Redis: what it holds, the scripts that change it, and the watch over it."""

"""The index in Redis: its contents, the scripts that change it, and the watch over it."""

"""Constrained output: the API server checks grammars, and the engine follows them."""

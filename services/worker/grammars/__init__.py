"""Constrained output: the API server checks grammars, the engine follows them."""

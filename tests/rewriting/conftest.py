"""Left out where torch, transformers or PEFT are not installed."""

from __future__ import annotations

from importlib.util import find_spec

_NEEDED = ("torch", "transformers", "peft")
_FILES = ["test_against_peft.py", "test_pickled.py", "test_respelling.py", "test_other_methods.py"]
collect_ignore_glob = [] if all(find_spec(name) for name in _NEEDED) else _FILES

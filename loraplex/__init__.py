"""Loraplex: publish LoRA adapters and decode many of them in one batch.

The async clients are `RegistryClient` and `InferenceClient`, the blocking ones `BlockingRegistry`
and `BlockingInference`. They raise the errors of `loraplex.errors`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loraplex.api.registry import AdapterVersion, Published, Tag, UsageEntry
    from loraplex.api.sampling import Grammar, Sampling
    from loraplex.client.blocking import BlockingInference, BlockingRegistry
    from loraplex.client.generation import Completion, CompletionChunk, Message
    from loraplex.client.inference_client import InferenceClient
    from loraplex.client.publishing import Publication
    from loraplex.client.registry_client import RegistryClient
    from loraplex.client.settings import Credentials
    from loraplex.client.vectors import Embeddings, Score, Scores
    from loraplex.errors import LoraplexError

__version__ = "0.1.0"

_HOMES = {
    "AdapterVersion": "api.registry",
    "BlockingInference": "client.blocking",
    "BlockingRegistry": "client.blocking",
    "Completion": "client.generation",
    "CompletionChunk": "client.generation",
    "Credentials": "client.settings",
    "Embeddings": "client.vectors",
    "Grammar": "api.sampling",
    "InferenceClient": "client.inference_client",
    "LoraplexError": "errors",
    "Message": "client.generation",
    "Publication": "client.publishing",
    "Published": "api.registry",
    "RegistryClient": "client.registry_client",
    "Sampling": "api.sampling",
    "Score": "client.vectors",
    "Scores": "client.vectors",
    "Tag": "api.registry",
    "UsageEntry": "api.registry",
}

__all__ = [
    "AdapterVersion",
    "BlockingInference",
    "BlockingRegistry",
    "Completion",
    "CompletionChunk",
    "Credentials",
    "Embeddings",
    "Grammar",
    "InferenceClient",
    "LoraplexError",
    "Message",
    "Publication",
    "Published",
    "RegistryClient",
    "Sampling",
    "Score",
    "Scores",
    "Tag",
    "UsageEntry",
]


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *_HOMES})


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first use, so that `--help` does not wait for gRPC."""
    if name not in _HOMES:
        raise AttributeError(f"module 'loraplex' has no attribute {name!r}")
    return getattr(importlib.import_module(f"loraplex.{_HOMES[name]}"), name)

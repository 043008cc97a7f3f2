"""Loraplex: publish LoRA adapters and decode many of them in one batch.

Async clients: `RegistryClient`, `InferenceClient`; blocking ones: `BlockingRegistry`,
`BlockingInference`. Every failure is one of `loraplex.errors`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loraplex.api.sampling import Grammar, Sampling
    from loraplex.blocking import BlockingInference, BlockingRegistry
    from loraplex.errors import LoraplexError
    from loraplex.generation import Completion, Message, Piece
    from loraplex.inference_client import InferenceClient
    from loraplex.publishing import Publication
    from loraplex.registry_client import RegistryClient
    from loraplex.settings import Credentials
    from loraplex.types import AdapterVersion, Published, Tag
    from loraplex.vectors import Embeddings, Score, Scores

_HOMES = {
    "AdapterVersion": "types",
    "BlockingInference": "blocking",
    "BlockingRegistry": "blocking",
    "Completion": "generation",
    "Credentials": "settings",
    "Embeddings": "vectors",
    "Grammar": "api.sampling",
    "InferenceClient": "inference_client",
    "LoraplexError": "errors",
    "Message": "generation",
    "Piece": "generation",
    "Publication": "publishing",
    "Published": "types",
    "RegistryClient": "registry_client",
    "Sampling": "api.sampling",
    "Score": "vectors",
    "Scores": "vectors",
    "Tag": "types",
}

__all__ = [
    "AdapterVersion",
    "BlockingInference",
    "BlockingRegistry",
    "Completion",
    "Credentials",
    "Embeddings",
    "Grammar",
    "InferenceClient",
    "LoraplexError",
    "Message",
    "Piece",
    "Publication",
    "Published",
    "RegistryClient",
    "Sampling",
    "Score",
    "Scores",
    "Tag",
]


def __getattr__(name: str) -> Any:
    """Load the module of a public name on first use: command line help must not wait for gRPC."""
    if name not in _HOMES:
        raise AttributeError(f"module 'loraplex' has no attribute {name!r}")
    return getattr(importlib.import_module(f"loraplex.{_HOMES[name]}"), name)

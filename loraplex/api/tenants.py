"""A tenant and its limits: what it may store, sign and run, and which service checks it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits of an owner of adapters, at all gateways together; 0 = no limit."""

    tenant: str
    max_bytes: int = 0
    """Bytes of files of live versions and unfinished uploads; checked by the registry."""
    max_versions: int = 0
    """Live versions; checked by the registry."""
    requests_per_s: float = 0.0
    """Checked by the gateways (`admission/rates.py`)."""
    tokens_per_s: float = 0.0
    """Prompt tokens and generated tokens; checked by the gateways."""
    max_concurrent: int = 0
    """Sequences that run concurrently; checked by the gateways (`admission/concurrency.py`)."""
    fairness_weight: float = 1.0
    """Share of the service while others wait: 2 gets twice the tokens of 1."""
    signature_keys: tuple[str, ...] = ()
    """EC public keys in PEM; if there are any, versions need a signature by one of them."""
    max_kl: float = 0.0
    """Largest divergence in nats per token: tags may point only at versions that an operator
    certified to be within it. 0 = no bound."""


@dataclass(frozen=True, slots=True)
class Tenant(TenantLimits):
    """An owner of adapters, with limits and use."""

    used_bytes: int = 0
    used_versions: int = 0

"""The documents of the registry, as stored in the object store and in the index.

Each carries `generation`, which rises by one with every change of the same document: the index
keeps the highest it has seen, whatever order changes arrive in.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from loraplex.adapter_format import File, Geometry
from loraplex.adapter_format.pooling_fields import PoolingFields
from loraplex.adapter_format.tasks import CAUSAL_LM
from loraplex.api.registry import TagTarget
from loraplex.api.tenants import TenantLimits
from loraplex.errors import Violation


def now_s() -> float:
    """Unix time of this machine: for records that people read, never for decisions about bytes."""
    return time.time()


MAX_TAG_MOVES = 32

PRIVATE, SHARED, PUBLIC = 1, 2, 3
"""Visibility of an adapter, numbered as on the wire."""

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """An immutable upload. Generation 1 is live, higher ones are tombstones."""

    tenant: str
    name: str
    """Name in lower case."""
    version: int
    digest: str
    base_id: str
    base_fingerprint: str
    created_s: float
    files: tuple[File, ...]
    creator: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    parent: str = ""
    max_rank: int = 0
    num_modules: int = 0
    warnings: tuple[Violation, ...] = ()
    peft_version: str = ""
    signers: tuple[str, ...] = ()
    upload_id: str = ""
    generation: int = 1
    deleted_s: float = 0.0
    task: str = CAUSAL_LM
    pooling: PoolingFields = field(default_factory=PoolingFields)
    """How its vectors and scores are read; `num_labels` is always that of its head."""
    rope_scaling: str = ""
    """JSON of the adapter's own `RopeScaling`; "" = the same as its base."""
    eos_token_ids: tuple[int, ...] = ()
    """Token ids that end its output; empty = the base's."""
    spelling: str = ""
    """The name as people see it; "" = in lower case."""
    keep_versions: int = 0
    """Above 0: the version is an update, and only this many of the newest updates are kept."""
    expires_s: float = 0.0
    """When an ephemeral version is deleted; 0 = never."""
    purged: bool = False
    """Deleted with --purge: the bytes need not be retained."""

    @property
    def shown_name(self) -> str:
        return self.spelling or self.name

    @property
    def ref(self) -> str:
        return f"{self.tenant}/{self.shown_name}:v{self.version}"

    @property
    def deleted(self) -> bool:
        return self.generation > 1

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Move:
    """One past move of a tag."""

    generation: int
    targets: tuple[TagTarget, ...]
    moved_s: float
    mover: str
    move_id: str
    """Id of the operation; the same operation never moves a tag twice."""


@dataclass(frozen=True, slots=True)
class TagRecord:
    """A movable pointer. Without targets it is deleted; its generation still increases."""

    tenant: str
    name: str
    tag: str
    targets: tuple[TagTarget, ...]
    generation: int
    updated_s: float
    moves: tuple[Move, ...] = ()
    """Oldest first, at most 32, the present state included."""
    pending: tuple[TagTarget, ...] = ()
    """Targets of a staged move: they wait until workers have them loaded."""
    pending_reason: str = ""
    """Why a staged move is not complete yet, or why the last one failed."""
    pending_until_s: float = 0.0
    pending_mover: str = ""
    spelling: str = ""
    """The adapter's name as people see it; "" = in lower case."""

    @property
    def shown_name(self) -> str:
        return self.spelling or self.name

    @property
    def is_shown(self) -> bool:
        """A deleted tag is not, unless something is pending or failed."""
        return bool(self.targets or self.pending or self.pending_reason)

    def follows(self, earlier: TagRecord) -> bool | None:
        """Whether the last move of `earlier` is among those of this tag; None if that is
        unknown."""
        if not earlier.moves or earlier.moves[-1].generation != earlier.generation:
            return None
        if earlier.moves[-1] in self.moves:
            return True
        oldest = self.moves[0].generation if len(self.moves) == MAX_TAG_MOVES else 0
        return False if oldest <= earlier.generation else None


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """The part of an adapter that is independent of versions."""

    tenant: str
    name: str
    visibility: int
    """PRIVATE, SHARED or PUBLIC."""
    shared_with: tuple[str, ...] = ()
    pullable: bool = False
    """Whether tenants that may run it may download it too."""
    generation: int = 1
    description: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of the adapter, which may be changed; versions have labels of their own."""


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """A base and its geometry."""

    base_id: str
    geometry: Geometry
    weights_sha256: str = ""
    aliases: tuple[str, ...] = ()
    max_lora_rank: int = 0
    generation: int = 1


@dataclass(frozen=True, slots=True)
class TenantRecord(TenantLimits):
    """Limits of a tenant."""

    fairness_weight: float = 0.0
    """Weight of the tenant; 0 = that of a tenant without limits."""
    generation: int = 1


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key. The secret itself is known to its holder only."""

    key_id: str
    tenant: str
    scopes: tuple[str, ...]
    secret_sha256: str
    created_s: float
    expires_s: float = 0.0
    revoked_s: float = 0.0
    description: str = ""
    generation: int = 1


@dataclass(frozen=True, slots=True)
class SignatureRecord:
    """A signature of one version's files."""

    key_sha256: str
    """sha256 of the signer's public key in PEM."""
    bundle: str
    """The sigstore bundle, JSON."""
    actor: str
    created_s: float
    public_key: str = ""
    """PEM of the key by which the registry verified it; "" = it has not."""


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One change by one actor."""

    time_s: float
    actor: str
    tenant: str
    action: str
    subject: str
    digest: str = ""
    details: dict[str, str] = field(default_factory=dict)


def build(cls: type[R], fields: Any) -> R:
    """A record from parsed JSON. Raises ValueError if it is not one."""
    return msgspec.convert(fields, cls)


def to_fields(record: Any) -> dict[str, Any]:
    """A record as JSON values."""
    fields: dict[str, Any] = msgspec.to_builtins(record)
    return fields


def to_set_fields(record: Any) -> dict[str, Any]:
    """A record as JSON values, without fields that have their default; `generation` stays.

    `build` and `decode` restore the defaults. The index, which is in memory, keeps this form.
    """
    as_key: Any = type(record)
    defaults = _defaults(as_key)
    return {
        name: value
        for name, value in to_fields(record).items()
        if name == "generation" or name not in defaults or value != defaults[name]
    }


@functools.cache
def _defaults(cls: Any) -> dict[str, Any]:
    """The default of each field that has one, as a JSON value."""
    defaults: dict[str, Any] = {}
    for each in dataclasses.fields(cls):
        if each.default is not dataclasses.MISSING:
            defaults[each.name] = each.default
        elif each.default_factory is not dataclasses.MISSING:
            defaults[each.name] = each.default_factory()
    return {name: msgspec.to_builtins(value) for name, value in defaults.items()}

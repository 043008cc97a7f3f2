"""The records of the registry, as its clients return them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loraplex.errors import Violation

MAX_ONE_CALL_BYTES = 1 << 20
"""Most bytes of all files of an adapter that is published in one call. Larger ones are uploaded in
parts, which a registry stores as they come."""


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """One file of a version."""

    path: str
    size_bytes: int
    sha256: str
    """64 hex characters."""


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One immutable upload."""

    tenant: str
    name: str
    version: int
    digest: str
    """`sha256:...` of the core manifest: the identity of the adapter."""
    base_id: str
    base_fingerprint: str
    created_unix_s: float
    creator: str
    """Id of the key that published it; "" without auth."""
    max_rank: int
    num_modules: int
    size_bytes: int
    visibility: str
    """"private", "shared" or "public"."""
    tags: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    parent: str = ""
    files: tuple[AdapterFile, ...] = ()
    warnings: tuple[Violation, ...] = ()
    shared_with: tuple[str, ...] = ()
    peft_version: str = ""
    signers: tuple[str, ...] = ()
    """sha256 of the keys (PEM) whose signatures the registry verified."""
    pullable: bool = False
    """Whether tenants that may run it may download it too."""
    deleted: bool = False
    task: str = "CAUSAL_LM"
    """PEFT's task_type: "SEQ_CLS" scores, "FEATURE_EXTRACTION" embeds."""
    num_labels: int = 0
    """Number of outputs of its classification head; 0 without one."""
    rope_scaling: str = ""
    """A rotary embedding of its own, JSON as in config.json; "" = its base's."""
    eos_token_ids: tuple[int, ...] = ()
    """Token ids that end its output; empty = the base's."""
    expires_unix_s: float = 0.0
    """When an ephemeral version is deleted; 0 = it stays."""
    description: str = ""
    """Description of the adapter, which may be changed."""
    adapter_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the adapter, which may be changed; those of the version may not."""

    @property
    def ref(self) -> str:
        """`tenant/name:vN`."""
        return f"{self.tenant}/{self.name}:v{self.version}"


@dataclass(frozen=True, slots=True)
class Sharing:
    """The tenants that may use an adapter in addition to its owner."""

    name: str
    visibility: str
    """"private", "shared" or "public"."""
    shared_with: tuple[str, ...]
    pullable: bool
    """Whether they may download it too."""


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """The description and the labels of an adapter, which its versions share."""

    name: str
    description: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Signed:
    """A version with its signatures."""

    version: AdapterVersion
    bundles: Mapping[str, bytes]
    """Sigstore bundles by the sha256 of the signer's key."""
    policy_keys: tuple[str, ...]
    """Public keys in PEM, by one of which the version must be signed; empty = no signature
    needed."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """How near a version on a served base is to a reference of that base."""

    base_id: str
    reference: str
    """Name of the reference."""
    probe_sha256: str
    """sha256 of the texts that were scored."""
    num_tokens: int
    mean_kl: float
    """KL(reference || served) in nats per token."""
    max_kl: float
    """The largest of one token."""
    top1_agreement: float
    """Share of tokens at which both have the same most likely token."""
    created_unix_s: float = 0.0
    creator: str = ""
    quantization: str = ""
    """Scheme of the served base's quantisation at load; "" = served as it is published."""
    by_operator: bool = False
    """Whether a service or the first admin key stored it: only these count for a tenant's
    `max_kl`."""


@dataclass(frozen=True, slots=True)
class Published:
    """The acknowledgement of an upload."""

    version: AdapterVersion
    created: bool
    """False when this name already had the same content."""
    warnings: tuple[Violation, ...] = ()


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of checking an upload without storing it."""

    base_id: str
    max_rank: int
    warnings: tuple[Violation, ...] = ()


@dataclass(frozen=True, slots=True)
class TagTarget:
    """One target of a tag."""

    version: int
    digest: str
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Tag:
    """A movable pointer, or a weighted split; without targets it is deleted."""

    tenant: str
    name: str
    tag: str
    targets: tuple[TagTarget, ...]
    generation: int
    updated_unix_s: float
    pending: tuple[TagTarget, ...] = ()
    """Targets of a staged move, which is made once workers have loaded them."""
    pending_reason: str = ""
    pending_until_unix_s: float = 0.0
    pending_left_s: float = 0.0
    """Seconds until then when the registry sent this."""

    def is_older_than(self, other: Tag) -> bool:
        """Compares generation and time, because a recreated tag counts from 1 again."""
        return self.generation < other.generation and self.updated_unix_s <= other.updated_unix_s


@dataclass(frozen=True, slots=True)
class TagMove:
    """One past move of a tag."""

    generation: int
    targets: tuple[TagTarget, ...]
    """Empty = deleted."""
    moved_unix_s: float
    mover: str
    """Id of the key that moved it; "" without auth."""
    name: str
    """Name of the adapter as it was first published."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The version that a reference names, with all tags of its adapter."""

    version: AdapterVersion
    tags: tuple[Tag, ...]


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A base that adapters can be published for."""

    base_id: str
    model_type: str
    fingerprint: str
    num_layers: int
    vocab_size: int
    aliases: tuple[str, ...]
    max_lora_rank: int


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the registry, as a watch reports it."""

    kind: str
    """"version", "tag", "base", or "snapshot" (forget what was known)."""
    version: AdapterVersion | None = None
    tag: Tag | None = None
    base_id: str = ""
    resume_token: str = ""
    """Continue after this change with this token."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change by one actor."""

    time_unix_s: float
    actor: str
    tenant: str
    action: str
    subject: str
    digest: str
    details: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key without its secret."""

    key_id: str
    tenant: str
    scopes: tuple[str, ...]
    created_unix_s: float
    expires_unix_s: float
    """0 = never."""
    revoked: bool
    description: str


@dataclass(frozen=True, slots=True)
class Collected:
    """The results of a garbage collection, or of a dry run."""

    deleted_objects: int
    deleted_bytes: int
    kept_objects: int


@dataclass(frozen=True, slots=True)
class Reindexed:
    """The counts of a rebuild of the index."""

    versions: int
    tags: int
    bases: int
    epoch: str


@dataclass(frozen=True, slots=True)
class UsageEntry:
    """The usage of one model by one tenant on one day."""

    day: str
    """YYYY-MM-DD, in UTC."""
    tenant: str
    model: str
    """tenant/name of the adapter, several joined by +, or the id of the base."""
    requests: int
    """Requests that ended, including failed and cancelled ones."""
    errors: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed again."""
    generated_tokens: int
    duration_s: float
    """Time from arrival to end, summed over the requests."""

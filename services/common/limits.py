"""The limits on everything that a caller can make large: one table for gRPC and HTTP.

Servers check a caller's key before they receive its message, and the message's size before they
parse it: a parsed message takes up to 33 times the memory of its bytes. `docs/reference/limits.md`
shows this table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from loraplex.errors import InvalidRequest, ResourceExhausted

KIB = 1 << 10
MIB = 1 << 20

SERVICE_KEY_IDS = frozenset({"", "service"})
"""Key ids of callers without a tenant's key: services, and everybody where auth is off."""


@dataclass(frozen=True, slots=True)
class MethodLimits:
    """Limits of one gRPC method or HTTP endpoint."""

    max_message_bytes: int = 1 * MIB
    """Largest size in bytes of one message or of an HTTP body."""
    max_calls_per_tenant: int = 0
    """Most calls that the keys of one tenant may have open at one process; 0 = no limit. Services
    and callers without auth are not limited."""
    num_calls: int = 0
    """Number of calls that one call counts as in its tenant's rate; 0 = it is not counted."""


DEFAULT = MethodLimits(max_calls_per_tenant=1024)
"""All other methods. Their open calls count together."""
REGISTRY_DEFAULT = MethodLimits(max_calls_per_tenant=1024, num_calls=1)
"""All other methods of the registry. Its rate of calls lets a tenant have 600 of them at once."""

_INFERENCE = "/loraplex.v1.InferenceService/"
_ADMIN = "/loraplex.v1.AdminService/"
_REGISTRY = "/loraplex.v1.RegistryService/"
_WORKER = "/loraplex.v1.WorkerService/"

METHODS: Mapping[str, MethodLimits] = {
    # As many as a gateway runs and lets wait: an open call takes memory before it is a request, and
    # until its answer is read.
    _INFERENCE + "Generate": MethodLimits(max_message_bytes=4 * MIB, max_calls_per_tenant=8192),
    _INFERENCE + "Embed": MethodLimits(max_message_bytes=4 * MIB, max_calls_per_tenant=8192),
    _INFERENCE + "Score": MethodLimits(max_message_bytes=4 * MIB, max_calls_per_tenant=8192),
    _ADMIN + "MirrorRequests": MethodLimits(max_calls_per_tenant=4),
    # A safetensors header of at most 8 MiB, and the config.
    _REGISTRY + "ValidateAdapter": MethodLimits(
        max_message_bytes=9 * MIB, max_calls_per_tenant=2, num_calls=10
    ),
    # Chunks have at most 1 MiB.
    _REGISTRY + "UploadPart": MethodLimits(
        max_message_bytes=2 * MIB, max_calls_per_tenant=32, num_calls=1
    ),
    _REGISTRY + "PublishAdapter": MethodLimits(
        max_message_bytes=2 * MIB, max_calls_per_tenant=32, num_calls=2
    ),
    _REGISTRY + "DownloadAdapter": MethodLimits(max_calls_per_tenant=32, num_calls=1),
    _REGISTRY + "WatchAdapters": MethodLimits(max_calls_per_tenant=16, num_calls=10),
    # Pages have up to 1,000 entries, or 4 MB; usage is read for up to 400 days.
    _REGISTRY + "ListAdapters": MethodLimits(max_calls_per_tenant=32, num_calls=10),
    _REGISTRY + "ListAudit": MethodLimits(max_calls_per_tenant=32, num_calls=10),
    _REGISTRY + "ListUsage": MethodLimits(max_calls_per_tenant=32, num_calls=20),
    # The record of a key is never removed, and lists look through those of all tenants.
    _REGISTRY + "CreateKey": MethodLimits(max_calls_per_tenant=32, num_calls=20),
    # 5,000 counts, some of eight adapters together, and the names of 5,000 ephemeral adapters. A
    # gateway sends a report until it is accepted, and no other one before.
    _REGISTRY + "RecordUsage": MethodLimits(max_message_bytes=9 * MIB, num_calls=1),
    _WORKER + "Session": MethodLimits(max_message_bytes=16 * MIB),
    _WORKER + "Generate": MethodLimits(max_message_bytes=16 * MIB),
}
"""Methods whose limits are not `DEFAULT`."""

HTTP_BODY = MethodLimits(max_message_bytes=8 * MIB)
"""Limits of the bodies of all HTTP endpoints of the gateway."""
CALLS_PER_S = 200
"""Calls per second of one tenant that one registry answers, and reads that one gateway answers:
`num_calls`. A publication of a large adapter takes five, of a small one two."""
CALL_BURST = 200
"""Calls that may arrive at the same time."""
MAX_CALL_WAIT_S = 2
"""Longest delay of a call in seconds. One that would have to wait longer is refused."""
LIST_CALLS = 10
"""Number of calls that a list of models, or of what the console shows, counts as."""
TEXT_BYTES_PER_CALL = 4 * KIB
"""A request for the tokens of a text, or for the text of tokens, counts as one call, and as one
more for each of these."""
REFUSED_CALLS = 5
"""Number of calls that a refused request for tokens counts as. Otherwise nothing would bound the
number of refusals."""
USAGE_CALLS = 20
"""Number of calls that a report of usage counts as."""

DOCUMENTS_PER_CALL = 20
"""Versions and tags that a registry reads for each call that a call counts as. If there are more,
it counts as more calls."""

MAX_STREAMS_PER_CONNECTION = 256
"""Most open calls of one HTTP/2 connection."""
MAX_UNREAD_BYTES = 512 * KIB
"""Bytes of a call, and of all calls of one connection together, that a gRPC server receives before
handlers read them. For a message that a handler waits for, it receives up to 1 MiB at a time."""
MAX_WAITING_CALLS = 8000
"""Most calls that wait until a gRPC server takes them. While there are more, it accepts no
connections and closes those that have made no call with a valid key. Fewer may come through the
edge from one address, because its connections carry calls of everybody."""
MAX_OPEN_STREAMS = 1024
"""Most watches of a server's health, which need no key, most calls of reflection, and most calls
without a key that wait for their clients."""


@dataclass(frozen=True, slots=True)
class NumberLimits:
    """The range of one number that a caller sends."""

    least: float
    most: float

    def check(self, field: str, value: float) -> float:
        """Returns the number. Raises InvalidRequest if it is outside the range, as NaN is."""
        if not self.least <= value <= self.most:
            description = f"must be a number from {self.least:,g} to {self.most:,.0f}"
            raise InvalidRequest.field(field, value, description)
        return value


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits of the processes that do one kind of work on what tenants send."""

    work: str
    """Names the work in errors, such as "grammars"."""
    num_processes: int
    memory_bytes: int
    """Memory limit of each process in bytes."""
    timeout_s: float
    """Longest time of one job in a process, in seconds."""
    cpu_s: float = 0.0
    """Most processor time of one job in seconds, which does not depend on how busy the machine is;
    0 = only `timeout_s` limits the job."""
    max_wait_s: float = 30.0
    """Longest wait for a free process in seconds."""
    start_timeout_s: float = 30.0
    """Longest time in seconds that a process takes to start."""
    keeps_processes: bool = True
    """False ends a process after each job, which returns its memory."""
    num_answers: int = 0
    """Most answers that are remembered by their key."""


# Together they leave the gateway's pod (3 GiB) 1600 MiB, the registry's (1 GiB) 448 MiB and the
# worker's (8 GiB) 5 GiB. `tests/deploy` compares them with the manifests.
TEMPLATES = PoolLimits(
    "chat templates", num_processes=3, memory_bytes=192 * MIB, timeout_s=2.0, max_wait_s=10.0
)
TOKENIZER_FILES = PoolLimits(
    # Tokenizers of today's largest vocabularies (25 MB of JSON) take 325 MB and 1.5 s.
    "tokenizer files",
    num_processes=2,
    memory_bytes=448 * MIB,
    timeout_s=20.0,
    cpu_s=10.0,
    max_wait_s=60.0,
    keeps_processes=False,
)
GRAMMARS = PoolLimits(
    "grammars",
    num_processes=2,
    memory_bytes=1536 * MIB,
    timeout_s=5.0,
    cpu_s=1.0,  # schemas of hundreds of properties take 0.03
    start_timeout_s=60.0,  # for Python and a large vocabulary
    num_answers=1024,
)
VALIDATIONS = PoolLimits(
    "validations", num_processes=2, memory_bytes=288 * MIB, timeout_s=30.0, max_wait_s=60.0
)
POOLS = {
    "gateway": (TEMPLATES, TOKENIZER_FILES),
    "registry": (VALIDATIONS,),
    "worker": (GRAMMARS,),
}
"""Limits of the process pools by service."""

YEAR_S = 365.0 * 24 * 3600
KEY_LIFETIME_S = NumberLimits(0, 100 * YEAR_S)
WAIT_S = NumberLimits(0, YEAR_S)
"""Seconds for which a tag waits until its adapter is loaded."""
KEPT_VERSIONS = NumberLimits(0, 1000)
"""`keep_versions` of an upload; 0 = all versions are kept."""
EPHEMERAL_S = NumberLimits(0, 30.0 * 24 * 3600)
"""Lifetime of an ephemeral version in seconds; 0 = the version is not ephemeral."""
QUOTA = NumberLimits(0, float(1 << 62))
"""Bytes, versions and sequences of a tenant; 0 = no limit."""
RATE_PER_S = NumberLimits(0, 1e12)
"""Tokens and requests per second of a tenant; 0 = no limit."""
FILE_LIFETIME_S = NumberLimits(3600, 30.0 * 24 * 3600)
"""Seconds for which a file is kept."""
FAIRNESS_WEIGHT = NumberLimits(0, 1000)
DIVERGENCE = NumberLimits(0, 1000)
"""Nats per token that a tenant's versions may diverge; 0 = no limit."""

MAX_DESCRIPTION_CHARS = 256
"""Most characters in the description of a key."""
MAX_REASON_CHARS = 256
"""Most characters of the reason for a move of a tag."""
MAX_LABELS_BYTES = 32 * KIB
"""Most bytes of the labels of a version, and of those of an adapter. Every gateway keeps them."""
MAX_MODEL_CHARS = 512
MAX_CACHE_SALT_CHARS = 256
MAX_REQUEST_ID_CHARS = 256
MAX_TRACE_CHARS = 256
MAX_SPLIT_KEY_CHARS = 1024
MAX_ADAPTERS_PER_REQUEST = 8
MAX_SEQUENCES_PER_REQUEST = 1024
"""Most prompts times choices of one HTTP request."""
MAX_SMALL_MESSAGE_BYTES = 64 * KIB
"""Size in bytes from which HTTP bodies and gRPC requests wait for each other."""
MAX_WAITING_MESSAGES_PER_TENANT = 64
"""Most of these that wait to be parsed."""
MAX_HTTP_CONNECTIONS = 8192
MAX_HTTP_HEAD_BYTES = 16 * KIB
"""Largest head of an HTTP request."""
MAX_HTTP_LINES = 256
"""Most lines of it. Each takes the HTTP parser about 1.3 microseconds, however short."""
MAX_HTTP_HEADER_S = 30
"""Longest time in seconds for the head of an HTTP request to arrive."""
MAX_HTTP_UNREAD_S = 60
"""Longest time in which a client may read less than `MIN_HTTP_READ_BYTES` of a waiting answer
before its connection is closed."""
MIN_HTTP_READ_BYTES = 64 * KIB
MAX_JSON_COMMAS = 1 << 20
"""Most values in an HTTP body, strings included: JSON with more has more values than tokens fit in
a context."""
MAX_JSON_BRACKETS = 1 << 16
"""Most opening brackets in an HTTP body. Objects and lists take the most time: a conversation of as
many messages takes the event loop 0.4 s. The tenant's next large body waits 200 times as long."""
MAX_LARGE_BODIES = 8
"""Most large HTTP bodies that one gateway holds in memory before they are parsed."""
MAX_LARGE_BODIES_PER_TENANT = 2
MIN_HTTP_CHUNK_BYTES = 512
MAX_SMALL_HTTP_CHUNKS = 1024
"""Chunks of one chunked HTTP body that are smaller. Each takes the HTTP parser about 10
microseconds: in chunks of one byte, each MiB of a body would stop the event loop for 10 s."""
MAX_BODY_S = 60
"""Longest time in seconds for an HTTP body to arrive."""
MAX_COLLECTED_BYTES = 512 * MIB
"""Most tokens, logprobs, experts and vectors (60 bytes for each number) that one gateway holds for
answers that are not streamed, and most bytes of large answers that their clients have not read."""
MAX_COLLECTED_BYTES_PER_TENANT = 256 * MIB
"""The experts or vectors in one answer of a caller without a tenant's key have at most as many
bytes, too."""
MAX_STORED_RESPONSE_BYTES = 128 * MIB
"""Most bytes of JSON of the responses that one gateway keeps for `previous_response_id`, over all
tenants."""
MAX_STORED_RESPONSE_BYTES_PER_TENANT = 16 * MIB
MAX_HISTORY_RESPONSES = 1024
"""Most stored responses of one conversation."""
MAX_RESPONSE_METADATA = 16
"""Most entries of `metadata` of a response or a batch job, with keys of 64 and values of 512
characters."""
MAX_FILE_BYTES = 200 * MIB
"""Most bytes of a file for a batch job."""
MAX_STORED_FILE_BYTES_PER_TENANT = 10240 * MIB
"""Most bytes of all files of a tenant, results of batch jobs included."""
MAX_FILES_PER_TENANT = 10_000
MAX_FILE_UPLOADS = 16
"""Most files that one gateway receives at the same time; each takes up to 16 MiB of memory."""
MAX_FILE_UPLOADS_PER_TENANT = 4
MAX_FILE_DOWNLOADS = 64
"""Most files that one gateway sends at the same time; each takes up to 2 MiB of memory."""
MAX_FILE_DOWNLOADS_PER_TENANT = 16
"""Most downloads of one tenant; as many more may wait."""
MAX_FOLDER_LOADS = 4
MAX_FOLDER_LOADS_PER_TENANT = 2
OBJECTS_PER_CALL = 20
"""Files or batch jobs of a tenant that a call looks at. It counts as one more call for each of
these, at most as `CALL_BURST`."""
MAX_FILE_S = 900
"""Longest time in seconds for a file to arrive."""
MAX_FILE_IDLE_S = 30
"""Longest time in seconds between two parts of a file."""
MAX_BATCH_LINES = 50_000
"""Most requests of a batch job."""
MAX_CUSTOM_ID_CHARS = 512
MAX_UNFINISHED_BATCHES_PER_TENANT = 100
MAX_BATCHES_PER_TENANT = 10_000
"""Most batch jobs of a tenant that are kept. A new one replaces the oldest that has ended."""
MAX_RUNNING_BATCHES = 64
"""Most batch jobs that one gateway runs at a time; others wait or run at another gateway."""
MAX_RUNNING_BATCHES_PER_TENANT = 4
MAX_BATCH_LINES_IN_FLIGHT = 256
"""Most requests of one batch job that are sent at the same time."""
MAX_BATCH_BYTES_IN_FLIGHT = 16 * MIB
"""Most bytes of the large lines of batch jobs that one gateway has sent and that have no result."""
MAX_FORM_PARTS = 16
MAX_FORM_VALUE_BYTES = 1 * KIB
"""Most bytes of a field of a form that is not a file."""
MAX_OPEN_UPLOADS_PER_TENANT = 1000
"""Most uploads that a tenant has begun and not finished."""
MAX_VERSIONS_PER_ADAPTER = 10_000
"""Most versions of an adapter that are not deleted. Some calls read all of them, and the metadata
server answers no other call meanwhile. Updates with `keep_versions` delete older ones, so a trainer
may publish any number."""
MAX_TAGS_PER_ADAPTER = 1000
"""Most tags of an adapter; `latest` is always allowed. Deleted ones count, because their history is
kept. Each look-up of one of its versions reads all tags, also for another tenant that may not see
it."""
MAX_OPENINGS = 32
"""Most uploads that one registry begins at the same time; each takes several writes to the object
store."""
MAX_OPENINGS_PER_TENANT = 4
"""Most uploads of one tenant that begin at the same time; further ones wait."""
MAX_UPLOAD_STREAMS = 32
"""Most uploads that one registry receives at the same time; each takes up to 12 MiB of memory."""
MAX_UPLOAD_STREAMS_PER_TENANT = 8
"""Most upload streams of one tenant; further ones wait until one ends."""
MAX_UPLOAD_IDLE_S = 30
"""Seconds without a chunk after which an upload's stream ends; what arrived is kept."""
MAX_CHARS_PER_TOKEN = 128
"""A text with more characters per token of the context is refused before it is tokenized. Tokens of
natural text have about four; the longest in today's vocabularies are runs of 128 spaces."""
MAX_TOKEN_IDS_PER_FIELD = 4096
"""Most distinct ids in each of stop_token_ids, allowed_token_ids, bad_token_ids and logit_bias, and
most tokens of all bad_words together."""
MAX_CANDIDATES = 256
"""Most candidates of one token. The gateway allows fewer for tokens that are generated."""
MAX_PROMPT_LOGPROBS = 256 * KIB
"""Logprobs of the tokens of one prompt in an answer, candidates and choices included.
They cross a worker's and a gateway's event loop packed, 8 bytes each; as JSON each takes 100."""
MAX_ROUTED_EXPERT_BYTES = 48 * MIB
"""Bytes of the experts of a prompt's tokens in the answer to one request, choices included. They
cross workers and gateways as bytes, and become a third more in JSON."""
MAX_MIRRORED_TOKENS = 64 * KIB
"""Most tokens of the requests that wait for one reader of mirrored requests; four characters of
their parameters count as one. Further requests are left out."""
MAX_HELD_TOKENS = 32 * MIB
"""Tokens of the prompts that wait or run at one gateway with keys; each takes 36 bytes."""
MAX_HELD_TOKENS_PER_TENANT = 16 * MIB
MAX_PAUSED_PER_TENANT = 256
"""Adapters that a tenant's admin may have paused at one gateway."""
MAX_BAD_WORDS = 512
MAX_BAD_WORD_CHARS = 128
MAX_GRAMMAR_CHARS = 128 * KIB
"""Most characters of a grammar, also of one that is made of the schemas of tools."""
MAX_COMPILED_GRAMMAR_BYTES = 16 * MIB
"""Most memory of a compiled grammar in bytes. 4,000 options or a schema of 1,000 properties take 4
to 6 MiB."""


MAX_WRONG_KEYS_PER_PEER = 60
"""Most wrong API keys that one address may send at once before its unknown keys are refused."""
WRONG_KEYS_PER_S = 1.0
"""How many further ones it may send per second."""
MAX_UNCHECKED_KEY_S = 24 * 3600
"""Longest time in seconds for which a gateway accepts a key that the registry cannot check because
it is unreachable."""
MAX_RUNNING = 4096
"""Most sequences that one gateway relays at the same time."""
MAX_QUEUED = 4096
"""Most requests that wait at one gateway."""


def limits_of(method: str) -> MethodLimits:
    """The limits of `/package.Service/Method`."""
    return METHODS.get(method, REGISTRY_DEFAULT if method.startswith(_REGISTRY) else DEFAULT)


def max_receive_bytes(services: Collection[str]) -> int:
    """The size of the largest message that any method of these services takes."""
    sizes = [
        limits.max_message_bytes
        for method, limits in METHODS.items()
        if method.split("/")[1] in services
    ]
    return max([DEFAULT.max_message_bytes, *sizes])


def check_message(method: str, num_bytes: int) -> None:
    """Raises ResourceExhausted if a message is larger than its method allows."""
    most = limits_of(method).max_message_bytes
    if num_bytes > most:
        raise ResourceExhausted(
            f"the message has {num_bytes} bytes; {method} takes at most {most}",
            reason="MESSAGE_TOO_LARGE",
        )


def check_chars(field: str, text: str, most: int) -> str:
    """Returns the text. Raises InvalidRequest if it is longer than `most` characters."""
    if len(text) > most:
        raise InvalidRequest.field(field, "", f"has {len(text)} characters; send at most {most}")
    return text

"""Print docs/reference/limits.md from the table of limits: scripts/limits_page.py > PAGE."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from loraplex_services.common import limits
from loraplex_services.common.limits import KIB, MIB, MethodLimits, NumberLimits

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "limits.md"

INTRODUCTION = """\
# Limits

Every size and number that a caller chooses has a limit. `services/common/limits.py` holds this
table, and `scripts/limits_page.py` prints this page from it.

A server checks the caller's key before it receives a message, and the size of the message before it
parses it. A message that is too large is refused with `RESOURCE_EXHAUSTED`, and a compressed one
with `UNIMPLEMENTED`. An HTTP body that is too large is refused with status 400 and the code
`body_too_large`. A field or a number beyond its limit is refused with `INVALID_ARGUMENT`, and the
error names the field.

## Messages and calls

The open calls per tenant are those that all keys of one tenant may have open at one process. A call
is open until its client has read the answer. Methods without a row of their own are counted
together. Calls of services, and calls without authentication, are not counted. A call beyond the
limit is refused with `RESOURCE_EXHAUSTED` and the reason `TOO_MANY_CALLS`.

Each tenant may make 200 calls per second to a registry, and 200 reads per second to a gateway. The
last column gives the number of calls that a call of this method counts as. A call above the rate is
delayed until the rate allows it. If the delay would be too long, it is refused with the same
reason, a second later. If a call to a registry reads more than 20 versions and tags for each call
that it counts as, it counts as more, and the next calls of the tenant wait. Calls with the first
admin key are exempt from this, because its lists show all tenants.

"""

POOLS = """\
## Work in separate processes

Templates, tokenizer files, grammars and headers that tenants send are processed in separate
processes with a memory limit (of the address space) and a time limit. Tenants get these processes
in rotation, and no tenant holds all of them at the same time. An adapter's template or a grammar
that ran out of time is refused for 30 seconds without another attempt. The registry's own process
validates headers of up to 64 KiB whose configs have at most 4 KiB and no regular expressions.

"""

COUNTS = {
    "MAX_STREAMS_PER_CONNECTION": "open calls on one HTTP/2 connection (gRPC)",
    "MAX_UNREAD_BYTES": "unread data of one gRPC connection",
    "MAX_WAITING_CALLS": "calls that have arrived at a gRPC server and wait to be taken",
    "MAX_OPEN_STREAMS": "open health watches of one server, as many calls of reflection, and as "
    "many calls without a key that wait for their clients, the oldest of which then ends",
    "MAX_DESCRIPTION_CHARS": "characters in the description of a key",
    "MAX_REASON_CHARS": "characters of the reason for a move of a tag",
    "MAX_LABELS_BYTES": "labels of a version, and of an adapter, keys and values together",
    "MAX_MODEL_CHARS": "characters in `model`, and in each adapter reference of a request",
    "MAX_CACHE_SALT_CHARS": "characters in `cache_salt`",
    "MAX_REQUEST_ID_CHARS": "characters in the `request_id` of a gRPC request",
    "MAX_TRACE_CHARS": "characters in the `traceparent` header",
    "MAX_SPLIT_KEY_CHARS": "characters in the split key of a request",
    "MAX_ADAPTERS_PER_REQUEST": "adapters combined in one request",
    "MAX_SEQUENCES_PER_REQUEST": "prompts times `n` in one HTTP request",
    "MAX_SMALL_MESSAGE_BYTES": "of an HTTP body or a gRPC request that is parsed immediately; "
    "larger ones of a tenant are parsed one after another, in at most 1/200 of a server's time",
    "MAX_WAITING_MESSAGES_PER_TENANT": "larger ones of a tenant that wait to be parsed; "
    "further ones are refused",
    "MAX_HTTP_CONNECTIONS": "HTTP connections of one gateway; further ones are closed",
    "MAX_HTTP_HEAD_BYTES": "of the head of an HTTP request: its first line and its headers",
    "MAX_HTTP_LINES": "lines of it",
    "MAX_HTTP_HEADER_S": "seconds for the head of an HTTP request to arrive",
    "MAX_JSON_COMMAS": "commas in an HTTP body; this bounds its number of values",
    "MAX_JSON_BRACKETS": "opening brackets and braces in an HTTP body",
    "MAX_LARGE_BODIES": "larger HTTP bodies that one gateway reads at a time; others wait",
    "MAX_LARGE_BODIES_PER_TENANT": "of these for one tenant",
    "MAX_SMALL_HTTP_CHUNKS": "chunks of fewer than 512 bytes in a chunked HTTP body",
    "MAX_BODY_S": "seconds for an HTTP body to arrive",
    "MAX_HTTP_UNREAD_S": "seconds in which a client must read 64 KiB of an answer that waits for "
    "it; otherwise its connection is closed",
    "MAX_COLLECTED_BYTES": "of tokens, logprobs, experts and vectors that one gateway holds for "
    "answers that are not streamed, and of large answers that their clients have not read; beyond "
    "it, requests of tenants that hold more than an equal share are refused",
    "MAX_COLLECTED_BYTES_PER_TENANT": "of these for one tenant; without keys, of the experts or "
    "vectors in one answer",
    "MAX_STORED_RESPONSE_BYTES": "of the responses that one gateway keeps for "
    "`previous_response_id`; beyond it, the tenant that holds most loses its oldest",
    "MAX_STORED_RESPONSE_BYTES_PER_TENANT": "of these for one tenant, which then loses its oldest",
    "MAX_HISTORY_RESPONSES": "stored responses that one conversation may consist of",
    "MAX_RESPONSE_METADATA": "entries in `metadata` of a response or a batch job",
    "MAX_FILE_BYTES": "of a file for a batch job",
    "MAX_STORED_FILE_BYTES_PER_TENANT": "of all files of a tenant, with the results of "
    "batch jobs; a batch job ends when its own exceed what was left",
    "MAX_FILES_PER_TENANT": "files of a tenant",
    "MAX_FILE_UPLOADS": "uploads of files that one gateway reads at a time; others wait",
    "MAX_FILE_UPLOADS_PER_TENANT": "of these for one tenant",
    "MAX_FILE_DOWNLOADS": "downloads of files that one gateway sends at a time; others wait",
    "MAX_FILE_DOWNLOADS_PER_TENANT": "of these for one tenant; as many more may wait",
    "MAX_FOLDER_LOADS": "adapters that one gateway reads from `LORAPLEX_LORA_ROOT` at a time; "
    "others wait",
    "MAX_FOLDER_LOADS_PER_TENANT": "of these for one tenant",
    "MAX_FILE_S": "seconds for a file to arrive",
    "MAX_FILE_IDLE_S": "seconds between two parts of a file",
    "MAX_BATCH_LINES": "requests of a batch job",
    "MAX_CUSTOM_ID_CHARS": "characters of `custom_id`",
    "MAX_UNFINISHED_BATCHES_PER_TENANT": "batch jobs of a tenant that have not ended",
    "MAX_BATCHES_PER_TENANT": "batch jobs of a tenant that are kept; a new one replaces the oldest "
    "that has ended",
    "MAX_RUNNING_BATCHES": "batch jobs that one gateway runs at a time; others wait",
    "MAX_RUNNING_BATCHES_PER_TENANT": "of these for one tenant",
    "MAX_BATCH_LINES_IN_FLIGHT": "requests of one batch job that run at a time",
    "MAX_BATCH_BYTES_IN_FLIGHT": "of the requests of batch jobs that one gateway runs at a time, "
    "those of up to 64 KiB not counted",
    "MAX_FORM_PARTS": "parts of a form that uploads a file",
    "MAX_FORM_VALUE_BYTES": "of a field of such a form",
    "MAX_OPEN_UPLOADS_PER_TENANT": "unfinished uploads of a tenant; their bytes count in its quota",
    "MAX_VERSIONS_PER_ADAPTER": "versions of an adapter that are not deleted; a further one is "
    "refused with `RESOURCE_EXHAUSTED` and the reason `TOO_MANY_VERSIONS`",
    "MAX_TAGS_PER_ADAPTER": "tags of an adapter, deleted ones included; a further one, except "
    "`latest`, is refused with `RESOURCE_EXHAUSTED` and the reason `TOO_MANY_TAGS`",
    "MAX_COMPILED_GRAMMAR_BYTES": "of memory of a compiled grammar",
    "MAX_OPENINGS": "uploads that one registry begins at a time; others wait",
    "MAX_OPENINGS_PER_TENANT": "of these for one tenant",
    "MAX_UPLOAD_STREAMS": "streams of uploads that one registry reads at a time; others wait",
    "MAX_UPLOAD_STREAMS_PER_TENANT": "of these for one tenant",
    "MAX_UPLOAD_IDLE_S": "seconds without a chunk after which such a stream ends with "
    "`DEADLINE_EXCEEDED`; what arrived is kept",
    "MAX_CALL_WAIT_S": "seconds that a call above the rate of its tenant is delayed",
    "MAX_CHARS_PER_TOKEN": "characters of a prompt per token of the model's context; a longer text "
    "is refused before it is tokenized",
    "MAX_WRONG_KEYS_PER_PEER": "wrong API keys from one address (IPv6: a network of 64 bits) at "
    "once, and one more each second; further keys that the server does not know are refused with "
    "status 429",
    "MAX_UNCHECKED_KEY_S": "seconds for which a gateway accepts a key that it cannot check, "
    "because the registry is unreachable",
    "MAX_RUNNING": "sequences that one gateway relays at a time; further requests wait",
    "MAX_QUEUED": "requests that wait at one gateway; further ones are refused with status 429",
    "MAX_TOKEN_IDS_PER_FIELD": "distinct ids in each of `stop_token_ids`, `allowed_token_ids`, "
    "`bad_token_ids` and `logit_bias`, tokens of all `bad_words` together, and tokens that an "
    "adapter adds to a base under a grammar",
    "MAX_CANDIDATES": "candidates of one token of a prompt (`prompt_logprobs`)",
    "MAX_PROMPT_LOGPROBS": "logprobs of the tokens of one prompt: tokens, times candidates and "
    "one, times `n`",
    "MAX_ROUTED_EXPERT_BYTES": "experts of prompt tokens for one request: tokens, times bytes of "
    "one token's experts, times `n`",
    "MAX_HELD_TOKENS": "tokens of prompts that wait or run at one gateway with keys; beyond it, "
    "requests of tenants that hold more than an equal share are refused",
    "MAX_HELD_TOKENS_PER_TENANT": "of these of one tenant",
    "MAX_PAUSED_PER_TENANT": "adapters that a tenant may have paused at one gateway",
    "MAX_MIRRORED_TOKENS": "tokens of mirrored requests that wait for one reader",
    "MAX_BAD_WORDS": "words in `bad_words`",
    "MAX_BAD_WORD_CHARS": "characters in each of these words",
    "MAX_GRAMMAR_CHARS": "characters of a grammar, also of one that is made of the schemas of "
    "tools",
}
NUMBERS = {
    "KEY_LIFETIME_S": "lifetime of an API key in seconds; 0 = it does not expire",
    "WAIT_S": "seconds that a tag waits for its adapter to be loaded",
    "KEPT_VERSIONS": "`keep_versions` of an upload; 0 = all versions are kept",
    "EPHEMERAL_S": "`ttl_s` of an upload, in seconds; 0 = the version is not ephemeral",
    "QUOTA": "`max_bytes`, `max_versions` and `max_concurrent` of a tenant; 0 = no limit",
    "RATE_PER_S": "`requests_per_s` and `tokens_per_s` of a tenant; 0 = no limit",
    "FILE_LIFETIME_S": "`expires_after.seconds` of a file, and `output_expires_after.seconds` of a "
    "batch",
    "FAIRNESS_WEIGHT": "`fairness_weight` of a tenant; 0 = 1",
    "DIVERGENCE": "`max_kl` of a tenant, in nats per token; 0 = no bound",
}


def page() -> Iterator[str]:
    """The lines of the page."""
    yield from INTRODUCTION.splitlines()
    yield "| method | largest message | open calls per tenant | counts as |"
    yield "|---|---|---|---|"
    for method, row in sorted(limits.METHODS.items()):
        yield _row(f"`{method.removeprefix('/loraplex.v1.')}`", row)
    yield _row("every other method of `RegistryService`", limits.REGISTRY_DEFAULT)
    yield _row("every other gRPC method", limits.DEFAULT)
    yield _row("every HTTP endpoint (body)", limits.HTTP_BODY)
    yield _row("`GET /v1/models/{ref}`", MethodLimits(num_calls=1))
    yield _row("`GET /v1/models`, `/console`", MethodLimits(num_calls=limits.LIST_CALLS))
    yield _row("`/v1/responses/{id}`", MethodLimits(num_calls=1))
    yield (
        "| `/tokenize`, `/detokenize`, `/v1/messages/count_tokens`, `/v1/responses/input_tokens` | "
        f"8 MiB | no limit | 1, and 1 more for each {_sized(limits.TEXT_BYTES_PER_CALL)}; at most "
        f"{limits.CALL_BURST} |"
    )
    yield _row("`GET /v1/usage`", MethodLimits(num_calls=limits.USAGE_CALLS))
    yield _row("any other request that is refused", MethodLimits(num_calls=limits.REFUSED_CALLS))
    yield ""
    yield "## Sizes within a request"
    yield ""
    yield "| at most | of |"
    yield "|---|---|"
    for name, meaning in COUNTS.items():
        count = getattr(limits, name)
        shown = _sized(count) if "_BYTES" in name else f"{count:,}"
        yield f"| {shown} | {meaning} |"
    yield ""
    yield from POOLS.splitlines()
    yield "| service | work | processes | memory of each | seconds for one job |"
    yield "|---|---|---|---|---|"
    for service, pools in limits.POOLS.items():
        for pool in pools:
            memory = _sized(pool.memory_bytes)
            seconds = f"{pool.timeout_s:g}"
            if pool.cpu_s:
                seconds += f", {pool.cpu_s:g} of processor time"
            row = (service, pool.work, str(pool.num_processes), memory, seconds)
            yield f"| {' | '.join(row)} |"
    yield ""
    yield "## Numbers"
    yield ""
    yield "Each must be finite and within its range."
    yield ""
    yield "| from | to | number |"
    yield "|---|---|---|"
    for name, meaning in NUMBERS.items():
        number: NumberLimits = getattr(limits, name)
        yield f"| {number.least:,g} | {number.most:,.0f} | {meaning} |"


def _row(name: str, row: MethodLimits) -> str:
    calls = str(row.max_calls_per_tenant or "no limit")
    counts_as = str(row.num_calls or "not counted")
    return f"| {name} | {_sized(row.max_message_bytes)} | {calls} | {counts_as} |"


def _sized(num_bytes: int) -> str:
    if num_bytes % (1024 * MIB) == 0:
        return f"{num_bytes // (1024 * MIB)} GiB"
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


if __name__ == "__main__":
    print("\n".join(page()))

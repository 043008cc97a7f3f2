"""The metrics of the gateway. Labels are bounded, also those of tenants and adapters."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter(
    "loraplex_gateway_requests_total",
    "Finished requests by API and outcome.",
    ["api", "outcome"],
)
REJECTIONS = Counter(
    "loraplex_gateway_rejections_total",
    "Requests that were refused before any computation, by reason.",
    ["reason"],
)
FIRST_TOKEN_S = Histogram(
    "loraplex_gateway_time_to_first_token_seconds",
    "Time from the arrival of a request to its first token.",
    ["base"],
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
REQUEST_S = Histogram(
    "loraplex_gateway_request_seconds",
    "Time from the arrival of a request to its end.",
    ["base"],
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 600),
)
PROMPT_TOKENS = Counter("loraplex_gateway_prompt_tokens_total", "Prompt tokens.", ["base"])
COMPLETION_TOKENS = Counter(
    "loraplex_gateway_completion_tokens_total", "Generated tokens.", ["base"]
)
TENANT_REQUESTS = Counter(
    "loraplex_gateway_tenant_requests_total",
    "Ended requests by tenant; tenants beyond the first hundred share one label.",
    ["tenant", "outcome"],
)
TENANT_TOKENS = Counter(
    "loraplex_gateway_tenant_tokens_total",
    "Tokens by tenant; tenants beyond the first hundred share one label.",
    ["tenant", "kind"],
)
ADAPTER_REQUESTS = Counter(
    "loraplex_gateway_adapter_requests_total",
    "Ended requests by adapter; adapters beyond the first hundred share one label.",
    ["adapter", "outcome"],
)
ADAPTER_TOKENS = Counter(
    "loraplex_gateway_adapter_tokens_total",
    "Tokens by adapter; adapters beyond the first hundred share one label.",
    ["adapter", "kind"],
)
BATCHES = Counter("loraplex_gateway_batches_total", "Ended batch jobs by status.", ["status"])
BATCH_REQUESTS = Counter(
    "loraplex_gateway_batch_requests_total",
    "Requests of batch jobs that got a result, by outcome; those of jobs that ended early are "
    "skipped.",
    ["outcome"],
)
RUNNING_BATCHES = Gauge("loraplex_gateway_running_batches", "Batch jobs that this gateway runs.")
FILE_BYTES = Counter(
    "loraplex_gateway_file_bytes_total",
    "Bytes of files that clients uploaded (in) and read (out).",
    ["direction"],
)
RETRIES = Counter(
    "loraplex_gateway_retries_total", "Requests sent to another worker before the first token."
)
CONTINUATIONS = Counter(
    "loraplex_gateway_continuations_total", "Streams continued on another worker."
)

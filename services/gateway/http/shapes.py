"""The objects in the answers of the endpoints, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class ErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """Why a request is refused; `param` names the field."""

    error: ErrorFields


class PromptTokenDetails(TypedDict):
    cached_tokens: int


class CompletionTokenDetails(TypedDict):
    reasoning_tokens: int


class UsageInfo(TypedDict):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: NotRequired[int]
    prompt_tokens_details: NotRequired[PromptTokenDetails]
    completion_tokens_details: NotRequired[CompletionTokenDetails]


class WeightsSpan(TypedDict):
    """Which adapters computed the tokens from `start` on."""

    start: int
    length: int
    adapters: list[str]
    digests: list[str]


class PromptLogprob(TypedDict):
    logprob: float
    rank: int | None
    decoded_token: str


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None] | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    weights: NotRequired[list[WeightsSpan]]


class CompletionResponse(TypedDict):
    """A whole answer, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageInfo | None]
    prompt_token_ids: NotRequired[list[int]]


class Function(TypedDict):
    name: str
    arguments: str


class ChatToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: Function
    index: NotRequired[int]


class Token(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class LogprobEntry(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[Token]


class ChatLogprobs(TypedDict):
    content: list[LogprobEntry]
    refusal: NotRequired[None]


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ChatToolCall]]


class ChoiceDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ChatToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    weights: NotRequired[list[WeightsSpan]]


class Chat(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None
    prompt_token_ids: NotRequired[list[int]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChoiceDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    weights: NotRequired[list[WeightsSpan]]


class ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageInfo | None]
    prompt_token_ids: NotRequired[list[int]]


class TokenChoice(TypedDict):
    index: int
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int]
    weights: NotRequired[list[WeightsSpan]]


class Generated(TypedDict):
    request_id: str
    model: str
    choices: list[TokenChoice]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None] | None]
    usage: NotRequired[UsageInfo]


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingResponse(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: UsageInfo


class Class(TypedDict):
    index: int
    label: str | None
    probs: list[float]
    logits: list[float]
    num_classes: int


class Classes(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Class]
    usage: UsageInfo


class ScoreItem(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class ScoreList(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreItem]
    usage: UsageInfo


class Ranked(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[dict[str, Any]]


class Ranking(TypedDict):
    id: str
    model: str
    usage: UsageInfo
    results: list[Ranked]


class TokenizeResponse(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(TypedDict):
    prompt: str


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: NotRequired[int]


class Models(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VersionResponse(TypedDict):
    version: str


class FileObject(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: str | None


class FileList(TypedDict):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchFault(TypedDict):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchFaults(TypedDict):
    object: Literal["list"]
    data: list[BatchFault]


class BatchCounts(TypedDict):
    total: int
    completed: int
    failed: int


class BatchUsage(TypedDict):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class BatchObject(TypedDict):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating",
        "in_progress",
        "finalizing",
        "completed",
        "failed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(TypedDict):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool

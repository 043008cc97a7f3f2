"""The result of a validation: everything that a worker needs to load an adapter."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loraplex.adapter_format.config import AdapterConfig
from loraplex.adapter_format.pooling_fields import PoolingFields
from loraplex.adapter_format.safetensors_header import TensorInfo
from loraplex.errors import Violation


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """One expert's part of tensors that stack all experts of a layer."""

    index: int
    num_experts: int
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """The changes of an adapter to one module of the base."""

    name: str
    """Base module, such as `model.layers.0.self_attn.q_proj`."""
    rank: int = 0
    """Number of rows of A; 0 if the module has no LoRA matrices."""
    scale: float = 0.0
    """Factor of B A x: alpha / r, or alpha / sqrt(r) with rsLoRA, after patterns."""
    a: TensorInfo | None = None
    """`[rank, in_features]`."""
    b: TensorInfo | None = None
    """`[out_features, rank]`."""
    magnitude: TensorInfo | None = None
    """DoRA: `[out_features]`, the norm of each row of W + scale B A after training."""
    lora_bias: TensorInfo | None = None
    """`[out_features]`, added after B and scaled with it."""
    embedding_a: TensorInfo | None = None
    """`[rank, vocabulary]`."""
    embedding_b: TensorInfo | None = None
    """`[width, rank]`."""
    token_delta: TensorInfo | None = None
    """`[tokens, width]`: rows that replace those of `token_ids`, in this order."""
    token_ids: tuple[int, ...] = ()
    full: TensorInfo | None = None
    """A whole weight that replaces the base's; an embedding or a head may have more rows."""
    base_copy: TensorInfo | None = None
    """The weight under the LoRA matrices, which PEFT saves for embeddings and heads: equal to the
    base's and then to be dropped, else (resized vocabulary) to be used in its place."""
    bias: TensorInfo | None = None
    """`[out_features]`: a whole bias that replaces the base's."""
    expert: ExpertShare | None = None
    """Set where `a` `[experts * rank, in]` and `b` `[out, rank * experts]` hold all experts: this
    module has rows [index * rank, (index + 1) * rank) of a, and every experts-th column of b."""
    num_rows: int = 0
    """Number of rows of the adapter's embedding and head, where it differs from the base's."""


@dataclass(frozen=True, slots=True)
class Report:
    """An adapter that passed validation."""

    config: AdapterConfig
    modules: tuple[AdapterModule, ...]
    """Ordered by name."""
    max_rank: int
    num_modules: int
    """Modules that carry LoRA matrices."""
    tensor_file_size: int
    """Bytes of adapter_model.safetensors."""
    base_fingerprint: str
    """Fingerprint of the geometry against which it was checked; "" if there was none."""
    warnings: tuple[Violation, ...]
    num_labels: int = 0
    """Number of outputs of its classification head; 0 without one."""

    @property
    def pooling(self) -> PoolingFields:
        """How its vectors and scores are read, with the number of labels that the head has."""
        return replace(self.config.pooling, num_labels=self.num_labels)

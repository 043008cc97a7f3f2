"""The interface of a runner, which computes steps for the engine. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from loraplex.adapter_format.geometry import Geometry
from loraplex.api.output import RoutingShape
from loraplex_services.worker.types.adapter_facts import AdapterFacts
from loraplex_services.worker.types.adapter_layout import AdapterLayout
from loraplex_services.worker.types.extents import Extents
from loraplex_services.worker.types.step_plan import SampledRow, StepPlan

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the loaded base that both processes need."""

    vocab_size: int
    """Logit width of the base; every id below it is a legal prompt token."""
    max_model_len: int
    """Context in tokens, prompt and output together."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    """"float32", "bfloat16" or "float16"."""
    device: str
    """"cpu" or "cuda"."""
    kernels: str
    """"triton", "torch", or an instruction set of the compiled CPU kernels."""
    numerics_fingerprint: str
    """Equal fingerprints give equal tokens in float32."""
    geometry: Geometry
    """The geometry against which adapters are validated."""
    quantization: str = ""
    """Quantisation at load, such as "int8" or "int8-kv-int8"; "" = none."""
    caps_context: bool = False
    """Whether `max_model_len` was set. It then limits adapters with a context of their own, too."""
    rope_switch_len: int | None = None
    """Requests with more known tokens than this have a different KV, from their first token on."""
    verifies_drafts: bool = False
    """Whether a token's logits have the same bits in a row of one token and in a row of several."""
    proposal_cost: float = 0.0
    """The time in which the base's own head proposes a draft, in steps; 0 = it has no such head."""
    expert_share: float = 0.0
    """Of the weights that a step of one token reads, the share that belongs to routed experts."""
    active_experts: float = 1.0
    """The share of a layer's experts that compute one token."""
    routing: RoutingShape | None = None
    """The shape of the experts of a token that steps report; None = the base has none, or runs
    through the transformers library."""


class Pending(Protocol[T_co]):
    """Work that runs concurrently with steps; `concurrent.futures.Future` is one."""

    def done(self) -> bool:
        """True if `result` would not wait."""
        ...

    def result(self) -> T_co:
        """The result of the work. Raises what the work raised."""
        ...

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Call `callback` once it is done, from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Copied:
    """An adapter whose bytes are in the arena, to be entered."""

    path: Path
    """The folder from which it was copied."""
    num_bytes: int
    """Bytes of its image."""
    facts: AdapterFacts
    elapsed_s: float
    """Seconds that the copy takes."""
    ready_s: float
    """Seconds of the copy after which steps that use the adapter may be launched."""
    failure: BaseException | None = None
    """Why another rank could not copy it, so that it cannot be entered."""
    is_on_host: bool = False
    """Whether its image is now in pinned host memory, from which the next copy is faster."""
    left_host: tuple[Path, ...] = ()
    """Folders whose images have left pinned host memory since the copy before."""


class LaunchedStep(Protocol):
    """A step that may still run."""

    def choose_tokens(self) -> None:
        """Begin the sampling, which the launch has left out because the plan awaits masks."""
        ...

    def result(self) -> list[SampledRow]:
        """Wait for the end of the step. Returns its rows in the order of the plan's. Raises what
        the step raised."""
        ...


class Runner(Protocol):
    """One base on one device: the arena's bytes, the adapters' tables, the forward pass."""

    arena_blocks: int
    block_bytes: int
    tokens_per_block: int
    kv_group_windows: tuple[int | None, ...]
    """Sliding window of each KV group in tokens; None = full attention."""
    state_blocks: int
    """Blocks of a running request's recurrent state; 0 = the base has none."""

    @property
    def layout(self) -> AdapterLayout:
        """The layout for which images of adapters are packed."""
        ...

    def pack_adapter(self, path: Path) -> Pending[int]:
        """Make the image of the adapter in a verified folder; the result is its number of pages."""
        ...

    def copy_adapter(self, path: Path, extents: Extents, step_s: float = 0.0) -> Pending[Copied]:
        """Fill `extents`, which no step reads in the meantime, from the image in a folder.

        `step_s`: how long a step takes. A copy that ends in less may be returned while it is in
        progress; the steps that use it then wait for the bytes that are missing.
        """
        ...

    def await_copies(self, timeout_s: float) -> None:
        """Return when no copy is in progress, or after `timeout_s`."""
        ...

    def enter_adapter(self, slot: int, copied: Copied) -> None:
        """Let steps use what was copied under `slot`, which is not in use."""
        ...

    def unload_adapter(self, slot: int) -> None:
        """Take `slot` out of the tables. The caller frees the blocks."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether a step may be launched while the previous one runs."""
        ...

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begin one forward pass and sampling; where the plan awaits masks, the forward pass alone.
        The caller then takes in the tokens of the step before, and calls `choose_tokens`.

        Steps and changes of the adapters' tables take effect in the order of these calls. A plan
        may follow outputs of the step before. The plan's requests may change afterwards.
        """
        ...

    @property
    def stall_s(self) -> float:
        """Seconds for which steps have waited for adapters that were being copied."""
        ...

    def model_info(self) -> ModelInfo:
        """Facts about the base."""
        ...

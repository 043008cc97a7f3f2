"""Other engines' Triton kernels for the same update, from a checkout of theirs outside of this one.

Only the files with kernels are imported; whatever else they import becomes `Nothing`, so neither
engine has to be installed. `path` is the folder that holds the package (`vllm/` or `sglang/`); of
it only the kernels' folder is needed, `FILES` says which files. Three sets of kernels are known:
vLLM's, SGLang's chunked ones (`csgmv`), and SGLang's for segments (`triton`).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_services.worker.ops.lora.runs import RowRun
from loraplex_services.worker.ops.lora.tables import SiteDelta

SEGMENT_ROWS = 16
KERNEL_FOLDERS = (
    "vllm/lora/ops/triton_ops",
    "sglang/kernels/ops/lora/dense",
    "sglang/srt/lora/triton_ops",
)

ENGINES = {"vllm": "vllm", "sglang": "sglang", "sglang-triton": "sglang"}
"""Sets of kernels, and the package that each is of."""
FILES = {
    "vllm": ("lora_shrink_op.py", "lora_expand_op.py", "lora_kernel_metadata.py"),
    "sglang": ("chunked_sgmv_shrink.py", "chunked_sgmv_expand.py"),
    "sglang-triton": ("sgemm_lora_a.py", "sgemm_lora_b.py", "qkv_lora_b.py", "gate_up_lora_b.py"),
}

Update = Callable[[Tensor, Tensor, Sequence[SiteDelta]], Callable[[], None]]
"""(y, x, each adapter's delta at one site) -> a run that adds the update to y in place."""


class MissingKernels(Exception):
    """A folder does not hold what a set of kernels is made of."""


class Nothing:
    """Stands for an import of a kernel's file that the kernel itself does not need."""

    def __getattr__(self, name: str) -> Nothing:
        return self

    def __call__(self, *args: object, **kwargs: object) -> Nothing:
        return self

    def __bool__(self) -> bool:
        return False

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (object,)


class Switches:
    """vLLM's settings as they are by default: off, and no folder."""

    def __getattr__(self, name: str) -> bool | None:
        return None if name.endswith("_FOLDER") else False


class Platform(Nothing):
    """Answers to the questions of kernels about the device. Triton takes the answers as constants,
    which must not be `Nothing`."""

    def is_cuda(self) -> bool:
        return torch.cuda.is_available()

    def has_device_capability(self, number: int) -> bool:
        """Whether it is of sm_`number` or later."""
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor >= number


def _tensor(data: Any, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(data, dtype=dtype, device=device)


OF_VLLM = {"envs": Switches(), "current_platform": Platform(), "async_tensor_h2d": _tensor}
"""Modules that vLLM's kernels import and need."""


def _as_is(function_or_key: Any) -> Any:
    """A decorator with or without arguments that changes nothing."""
    is_kernel = isinstance(function_or_key, triton.runtime.KernelInterface)
    return function_or_key if is_kernel else lambda function: function


def _device_name() -> str:
    """The name by which an engine looks up its tuned block sizes."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "unknown"


def _not_registered(*args: object, **kwargs: object) -> None:
    raise AttributeError("operators are not registered here")


def _nothing(name: str) -> Nothing:
    """Any attribute of an empty module but what Python itself asks of modules."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Real files for kernels, empty modules for the rest of a package."""

    def __init__(self, package: str, root: Path) -> None:
        self.package = package
        self._root = root

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.partition(".")[0] != self.package:
            return None
        relative = name.replace(".", "/")
        file = self._root / f"{relative}.py"
        if relative.rpartition("/")[0] in KERNEL_FOLDERS and file.exists():
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        known = {
            "triton": triton,
            "tl": tl,
            "init_logger": Nothing(),
            "direct_register_custom_op": _not_registered,
            "cached_triton_kernel": _as_is,
            "get_device_name": _device_name,
            **(OF_VLLM if self.package == "vllm" else {}),
        }
        module.__dict__.update(known, __getattr__=_nothing)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def load(engine: str, path: Path, runs: Sequence[RowRun], num_rows: int) -> Update:
    """The update of a set of kernels for a step's runs, which cover the rows in order.

    Raises:
        MissingKernels: naming the file that the folder lacks.
    """
    package, folder = ENGINES[engine], folder_of(engine, path)
    if not any(isinstance(f, _Finder) and f.package == package for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder(package, path))
    name = folder.replace("/", ".")
    return {"vllm": _vllm, "sglang": _sglang, "sglang-triton": _sglang_triton}[engine](
        name, runs, num_rows
    )


def folder_of(engine: str, path: Path) -> str:
    """Where in `path` the kernels are. Raises MissingKernels."""
    folders = [f for f in KERNEL_FOLDERS if f.startswith(ENGINES[engine] + "/")]
    for folder in folders:
        if all((path / folder / file).is_file() for file in FILES[engine]):
            return folder
    wanted = ", ".join(FILES[engine])
    raise MissingKernels(
        f"no kernels of {engine} in {path}: expected {wanted} in {' or '.join(folders)}"
    )


def _kernel(module: str, name: str) -> Any:
    """A function of a kernels' file. Raises MissingKernels where it is only a shim's."""
    found = getattr(importlib.import_module(module), name, None)
    if found is None or isinstance(found, Nothing):
        raise MissingKernels(f"{module} has no function {name}: another version, or a shim")
    return found


def _stacked(deltas: Sequence[SiteDelta], matrix: str, part: int) -> list[Tensor]:
    """One projection's A or B `[rank, width]` of each adapter, padded to the widest rank."""
    found = [getattr(delta, matrix)[part].data for delta in deltas]
    rank = max(len(data) for data in found)
    return [torch.nn.functional.pad(data, (0, 0, 0, rank - len(data))) for data in found]


def _vllm(folder: str, runs: Sequence[RowRun], num_rows: int) -> Update:
    shrink = _kernel(f"{folder}.lora_shrink_op", "_lora_shrink")
    expand = _kernel(f"{folder}.lora_expand_op", "_lora_expand")
    metadata = _kernel(f"{folder}.lora_kernel_metadata", "LoRAKernelMeta")

    def update(y: Tensor, x: Tensor, deltas: Sequence[SiteDelta]) -> Callable[[], None]:
        num_parts, scale = len(deltas[0].slices), deltas[0].slices[0].scale
        parts = range(num_parts)
        a = [torch.stack(_stacked(deltas, "a", part))[:, None].contiguous() for part in parts]
        b = [
            torch.stack(_stacked(deltas, "b", part)).transpose(1, 2)[:, None].contiguous()
            for part in parts
        ]
        meta = metadata.make(len(deltas), num_rows, x.device)
        slots = [run.slot for run in runs for _ in range(run.begin, run.end)]
        meta.prepare_tensors(torch.tensor(slots, dtype=torch.int32, device=x.device))
        extra = (True,) * (len(inspect.signature(meta.meta_args).parameters) - 1)
        args = meta.meta_args(num_rows, *extra)
        hidden = torch.empty(num_parts, num_rows, a[0].shape[2], device=x.device)
        # Partial sums are added by atomics; some releases leave it to the caller to clear.
        clears = "zero_" in inspect.getsource(shrink)

        def run() -> None:
            if not clears:
                hidden.zero_()
            shrink(x, a, hidden, *args, scale)
            expand(hidden, b, y, *args, offset_start=0, add_inputs=True)

        return run

    return update


def _sglang(folder: str, runs: Sequence[RowRun], num_rows: int) -> Update:
    shrink = _kernel(f"{folder}.chunked_sgmv_shrink", "chunked_sgmv_lora_shrink_forward")
    expand = _kernel(f"{folder}.chunked_sgmv_expand", "chunked_sgmv_lora_expand_forward")
    segments = [(run.slot, row) for run in runs for row in range(run.begin, run.end, SEGMENT_ROWS)]

    def update(y: Tensor, x: Tensor, deltas: Sequence[SiteDelta]) -> Callable[[], None]:
        slices, device = deltas[0].slices, x.device
        a, b, info = _of_sglang(deltas, segments, num_rows, device)
        info.bs, info.max_len = num_rows, SEGMENT_ROWS
        info.permutation = _numbers(range(num_rows), device)
        edges = [part.out_begin for part in slices] + [y.shape[1]]
        widest, offsets = max(part.out_len for part in slices), _numbers(edges, device)

        def run() -> None:
            hidden = shrink(x, a, info, len(slices))
            expand(hidden, b, info, offsets, widest, y)

        return run

    return update


def _sglang_triton(folder: str, runs: Sequence[RowRun], num_rows: int) -> Update:
    """One segment for each adapter's rows; three kernels for the second half, by site."""
    shrink = _kernel(f"{folder}.sgemm_lora_a", "sgemm_lora_a_fwd")
    expand = _kernel(f"{folder}.sgemm_lora_b", "sgemm_lora_b_fwd")
    expand_qkv = _kernel(f"{folder}.qkv_lora_b", "qkv_lora_b_fwd")
    expand_gate_up = _kernel(f"{folder}.gate_up_lora_b", "gate_up_lora_b_fwd")
    segments = [(run.slot, run.begin) for run in runs]

    def update(y: Tensor, x: Tensor, deltas: Sequence[SiteDelta]) -> Callable[[], None]:
        slices, device = deltas[0].slices, x.device
        a, b, info = _of_sglang(deltas, segments, num_rows, device)
        lens = [run.end - run.begin for run in runs]
        info.bs, info.max_len = len(runs), max(lens)
        info.seg_lens, info.permutation = _numbers(lens, device), None
        edges = [part.out_begin for part in slices] + [y.shape[1]]
        widest, offsets = max(part.out_len for part in slices), _numbers(edges, device)
        b = b.contiguous()
        has_equal_halves = [part.out_len for part in slices] == [widest, widest]
        num_slices = {} if len(slices) == 3 else {"n_slices": len(slices)}

        def run() -> None:
            hidden = shrink(x, a, info, len(slices))
            if len(slices) == 1:
                expand(hidden, b, info, y)
            elif has_equal_halves:
                expand_gate_up(hidden, b, info, widest, y)
            else:
                expand_qkv(hidden, b, info, offsets, widest, y, **num_slices)

        return run

    return update


def _of_sglang(
    deltas: Sequence[SiteDelta],
    segments: Sequence[tuple[int, int]],
    num_rows: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, types.SimpleNamespace]:
    """Weights and batch as SGLang lays them out: A `[adapters, parts * rank, in]`, B `[adapters,
    out, rank]`, and segments of token rows as (slot, first row)."""
    parts = range(len(deltas[0].slices))
    assert len({delta.rank for delta in deltas}) == 1, "laid out for equal ranks only"
    a = torch.stack([torch.cat([d.a[p].data for p in parts]) for d in deltas])
    b = torch.stack(
        [torch.cat(chunks) for chunks in zip(*(_turned(deltas, p) for p in parts), strict=True)]
    )
    info = types.SimpleNamespace(
        use_cuda_graph=False,
        num_segments=len(segments),
        seg_indptr=_numbers([row for _, row in segments] + [num_rows], device),
        weight_indices=_numbers([slot for slot, _ in segments], device),
        lora_ranks=_numbers([delta.slices[0].rank_len for delta in deltas], device),
        scalings=torch.tensor([d.slices[0].scale for d in deltas], device=device),
    )
    return a, b, info


def _numbers(values: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)


def _turned(deltas: Sequence[SiteDelta], part: int) -> list[Tensor]:
    return [data.T for data in _stacked(deltas, "b", part)]

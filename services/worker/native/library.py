"""The functions of a compiled library and their arguments, as `native/src` exports them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

DTYPE_CODES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
}
ACTIVATION_DTYPES = (torch.float32, torch.bfloat16)
_I, _D, _P = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "lpx_set_threads": (None, (_I,)),
    "lpx_packed_items": (_I, (_I, _I)),
    "lpx_pack": (None, (_P, _I, _I, _I, _P)),
    "lpx_linear": (None, (_P, _I, _P, _I, _P, _I, _I, _I, _I, _I)),
    "lpx_fixed_items": (_I, (_I, _I)),
    "lpx_pack_fixed": (None, (_P, _I, _I, _I, _P)),
    "lpx_linear_fixed": (None, (_P, _I, _P, _P, _I, _I, _I, _I, _I)),
    "lpx_code_bytes": (_I, (_I, _I, _I)),
    "lpx_pack_codes": (None, (_P, _I, _I, _I, _P)),
    "lpx_linear_codes": (None, (_P, _I, _P, _I, _P, _I, _P, *(_I,) * 4, _P, _I, _I, _I, _I)),
    "lpx_best_codes": (None, (_P, _I, _P, _I, _P, _I, _P, *(_I,) * 4, _P, _I, _I, _I, _I)),
    "lpx_gate_codes": (
        None,
        (_I, _P, _I, _P, _I, _P, _I, _P, *(_I,) * 4, _P, _I, _I, _I, _I),
    ),
    "lpx_tile_items": (_I, (_I, _I)),
    "lpx_prefers_tiles": (_I, ()),
    "lpx_choose_pairs": (_I, (_I,)),
    "lpx_pack_tiles": (None, (_P, _I, _I, _P)),
    "lpx_linear_tiles": (None, (_P, _I, _P, _P, _I, _I, _I, _I, _I)),
    "lpx_linear_gates": (None, (_I, _P, _I, _P, _P, *(_I,) * 4)),
    "lpx_linear_plain": (None, (_P, _P, _P, *(_I,) * 4)),
    "lpx_best_plain": (None, (_P, _P, _P, _I, _I, _I)),
    "lpx_add_lora": (None, (_P, _I, _I, _P, _I, _I, _I, _I, _P, _I)),
    "lpx_add_lora_gates": (None, (_I, _P, _I, _I, _P, _I, _I, _P, _I, _I, _I, _P, _I)),
    "lpx_add_lora_embedding": (None, (_P, _I, _P, _I, _I, _I, _I, _P)),
    "lpx_add_products": (None, (_P, _I, _I, _I, _P, _I, _I, _I, _P, _I)),
    "lpx_choose_experts": (None, (_P, *(_I,) * 6, _P, _P, _P)),
    "lpx_experts": (
        None,
        (_P, _I, _P, _P, _I, _P, *(_I,) * 4, _D, _D, _P, _I, _I, _I, _P, _I),
    ),
    "lpx_task_queries": (_I, ()),
    "lpx_attend": (None, (_P, _P, _P, _P, _P, _P, _I, _P, _P, _P, _I)),
    "lpx_attend_tiles": (None, (_P, _P, _P, _P, _P, _P, _P, _P, _I)),
    "lpx_norm": (None, (_P, _I, _P, _I, _P, _P, _I, _I, _I, _I, _I, _D, _I)),
    "lpx_rotate": (None, (_P, _I, _P, _P, _I, _I, _I, _I, _I)),
    "lpx_elementwise": (
        None,
        (_I, _P, *(_I,) * 3, _P, *(_I,) * 4, _P, *(_I,) * 7),
    ),
    "lpx_delta_net": (None, (*(_P, _I) * 3, _I, *(_P,) * 11, _I)),
    "lpx_truncate": (None, (_P, _I, _P, _I)),
    "lpx_draw": (None, (_P, _I, _I, _P, _P, _P, _I, _P, _I)),
    "lpx_kernel_number": (_I, (ctypes.c_char_p,)),
    "lpx_run_program": (None, (_P, _I)),
}


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library; calls release the GIL.

    Raises:
        OSError: it cannot be loaded.
    """
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library

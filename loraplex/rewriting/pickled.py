"""Converts adapters that older versions of PEFT saved as a pickle, `adapter_model.bin`.

The pickle is read in a separate process (see `pickle_process`). All other files of the adapter are
copied, and the result is validated like an upload.
"""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

from loraplex.adapter_format import TENSOR_FILE, Geometry, Report
from loraplex.adapter_format.files import PICKLE_FILE
from loraplex.adapter_format.folder import file_names
from loraplex.errors import InvalidAdapter, InvalidRequest, Unsupported
from loraplex.rewriting import child
from loraplex.rewriting.tensors import check_folder, copy_files, new_folder

TIMEOUT_S = 600.0
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG")


def is_pickled(folder: Path) -> bool:
    """Whether a folder has its weights only as a pickle."""
    return (folder / PICKLE_FILE).is_file() and not (folder / TENSOR_FILE).exists()


def from_pickle(
    folder: Path, out: Path, geometry: Geometry | None = None, dtype: str = ""
) -> Report:
    """Write the safetensors folder of a pickled adapter.

    Args:
        out: new, or an empty folder.
        geometry: the base to check the result against.
        dtype: F16, BF16 or F32; "" = as each tensor is stored.

    Raises:
        InvalidRequest: the folder holds no pickled adapter.
        InvalidAdapter: the pickle holds code or is damaged, or a file is of a refused kind.
        Unsupported: torch is not installed.
    """
    if not is_pickled(folder):
        description = f"holds no {PICKLE_FILE}, or {TENSOR_FILE} as well; there is nothing to do"
        raise InvalidRequest.field("DIR", str(folder), description)
    if find_spec("torch") is None:
        raise Unsupported(f"{PICKLE_FILE} can be read only with torch: pip install torch")
    names = file_names(folder, tensor_file=PICKLE_FILE)
    with new_folder(out) as partial:
        copy_files(folder, partial, [name for name in names if name != PICKLE_FILE])
        _convert(folder / PICKLE_FILE, partial / TENSOR_FILE, dtype)
        return check_folder(partial, geometry)


def _convert(source: Path, target: Path, dtype: str) -> None:
    """Run the process that reads the pickle and writes the safetensors file `target`."""
    environ = {name: os.environ[name] for name in _KEPT if name in os.environ}
    with source.open("rb") as pickle, target.open("wb") as sink:
        try:
            child.run(
                "pickle_process", [dtype] if dtype else [], environ, f"reads {PICKLE_FILE}",
                stdin=pickle, stdout=sink, timeout=TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            description = f"could not be read within {TIMEOUT_S:.0f} s"
            raise InvalidAdapter.field(PICKLE_FILE, source.stat().st_size, description) from None

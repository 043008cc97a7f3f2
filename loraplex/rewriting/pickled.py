"""Converts adapters that older versions of PEFT saved as a pickle, `adapter_model.bin`.

The pickle is read in a separate process (see `pickle_process`). All other files of the adapter are
copied, and the result is validated like an upload.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from loraplex.adapter_format import TENSOR_FILE, Geometry, Report
from loraplex.adapter_format.files import MAX_PICKLE_BYTES, PICKLE_FILE
from loraplex.adapter_format.folder import file_names
from loraplex.errors import InvalidAdapter, InvalidRequest, LoraplexError, Unsupported, Violation
from loraplex.rewriting.tensors import check_folder, copy_files, new_folder

TIMEOUT_S = 600.0
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG")
_REFUSED = 3


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
    size = source.stat().st_size
    if size > MAX_PICKLE_BYTES:
        description = f"must have at most {MAX_PICKLE_BYTES} bytes"
        raise InvalidAdapter.field(PICKLE_FILE, f"{size} bytes", description)
    environ = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    argv = [sys.executable, "-P", "-m", "loraplex.rewriting.pickle_process", *filter(None, [dtype])]
    with source.open("rb") as pickle, target.open("wb") as sink:
        try:
            done = subprocess.run(
                argv, stdin=pickle, stdout=sink, stderr=subprocess.PIPE, env=environ,
                timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            description = f"could not be read within {TIMEOUT_S:.0f} s"
            raise InvalidAdapter.field(PICKLE_FILE, size, description) from None
    if done.returncode == _REFUSED:
        raise InvalidAdapter.of([Violation(**json.loads(done.stderr.splitlines()[-1]))])
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise LoraplexError(f"the process that reads {PICKLE_FILE} ended: {last}")

"""The base model's files: where they are, and which of them gateways need for text."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from loraplex.errors import InvalidRequest, PermissionDenied, Unavailable, Unsupported
from loraplex.sources.hub import WRONG_ANSWERS
from loraplex_services.common.chat_template import chat_format, template_environment
from loraplex_services.common.objects.store import (
    ObjectInfo,
    ObjectStore,
    ObjectStoreError,
    read_chunks,
)

logger = logging.getLogger(__name__)

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt")
OTHER_FORMATS = ("*/*", "consolidated*.safetensors")
"""Subfolders and Mistral's own file, which hold the same weights in other formats."""
SAME_TIME_S = 1e-3
"""The largest difference between two floating-point readings of the same time."""
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
MAX_TOKENIZER_BYTES = 48 << 20
GGUF_MODULE = "loraplex_services.worker.model.formats.gguf_folder"
"""Translates a GGUF file, in a process of its own."""


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """The tokenizer's files and the digest over their names and contents."""

    files: tuple[tuple[str, bytes], ...]
    digest: str
    generation_config_json: str
    """Content of the file; "" if the base has none."""
    bos_token_id: int | None
    pad_token_id: int | None = None
    """Padding id of config.json: classification heads pool at the token before it."""


async def fetch_model(store: ObjectStore, folder: Path) -> Path:
    """Make `folder` a copy of the model files in an object store, and return it.

    A file that has not changed in the store since it was copied is kept, so an interrupted copy
    continues. If the store cannot be reached, a copy that was finished earlier is used.

    Raises:
        InvalidRequest: the store holds no config.json.
        ObjectStoreError: the store cannot be read, and no copy is finished.
    """
    folder.mkdir(parents=True, exist_ok=True)
    finished = folder / ".finished"
    copied: list[ObjectInfo] = []
    try:
        # Objects may be replaced during the copy, so it ends once another listing shows no change,
        # or the same one again, which is so where the folder does not keep times of files.
        while (changed := await _copy_changes(store, folder, finished)) and changed != copied:
            copied = changed
    except ObjectStoreError as error:
        if not finished.exists():
            raise
        logger.warning("serving the earlier copy of the base", extra={"reason": error.message})
        return folder
    if not (folder / "config.json").is_file():
        why = "there is no config.json; name the prefix right under which the model's files are"
        raise InvalidRequest.field("LORAPLEX_MODEL", store.url, why)
    finished.touch()
    return folder


async def _copy_changes(store: ObjectStore, folder: Path, finished: Path) -> list[ObjectInfo]:
    """Copy the model files that differ from those in `folder`, and remove others from it.

    Returns what was copied. Before a change, `finished` is deleted.
    """
    found = {info.key: info async for info in store.list_objects("") if _is_read(info.key)}
    gone = [path for path in folder.iterdir() if path != finished and path.name not in found]
    changed = [info for info in found.values() if not _is_copy(folder / info.key, info)]
    if gone or changed:
        finished.unlink(missing_ok=True)
    for path in gone:
        path.unlink()
    for info in changed:
        partial = folder / f".{info.key}.partial"
        with partial.open("wb") as file:
            async for chunk in read_chunks(store, info.key, 0, info.size):
                await asyncio.to_thread(file.write, chunk)
        os.utime(partial, (info.modified_s, info.modified_s))
        partial.replace(folder / info.key)
    return changed


def _is_read(key: str) -> bool:
    """Whether the object may be a part of a model."""
    return any(fnmatch(key, pattern) for pattern in MODEL_FILES) and not any(
        fnmatch(key, pattern) for pattern in OTHER_FORMATS
    )


def _is_copy(path: Path, info: ObjectInfo) -> bool:
    """Whether the file is a copy of the object as it is now: a copy has the time of its object."""
    if not path.is_file():
        return False
    stat = path.stat()
    return stat.st_size == info.size and abs(stat.st_mtime - info.modified_s) < SAME_TIME_S


def find_model(model: str, cache_folder: Path) -> Path:
    """The folder of a model, downloading a hub id through the hub's own client and cache, and
    translating a GGUF file into `cache_folder`.

    Raises:
        InvalidRequest: it is neither a folder nor a GGUF file nor a hub id that can be downloaded.
        PermissionDenied: the hub demands that its terms are accepted.
        Unavailable: the hub cannot be reached.
    """
    path = Path(model)
    if path.is_file() and path.suffix == ".gguf":
        return _translated(path.absolute(), cache_folder)
    if path.is_dir():
        if (path / "config.json").is_file():
            return path.resolve()
        if len(files := [*path.glob("*.gguf")]) == 1:
            return _translated(files[0].absolute(), cache_folder)
        why = "the folder has no config.json; to serve a GGUF file, name one"
        raise InvalidRequest.field("LORAPLEX_MODEL", model, why)
    if model.startswith(("/", ".")) or model.count("/") != 1:
        raise InvalidRequest.field("LORAPLEX_MODEL", model, "neither a folder nor a hub id")
    return _download(model)


def _translated(path: Path, cache_folder: Path) -> Path:
    """The folder that a GGUF file is translated into, once for each state of the file and of the
    tokenizer next to it. A link, such as those of the hub's cache, is not resolved: its target has
    neither the file's name nor the tokenizer next to it. Raises InvalidRequest with the reason of a
    refusal."""
    facts = [
        (str(file), str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns)
        for file in (path, *(path.parent / name for name in TOKENIZER_FILES))
        if file.is_file()
    ]
    folder = cache_folder / "models" / hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix="gguf-", dir=folder.parent, ignore_cleanup_errors=True
    ) as partial:
        command = [sys.executable, "-m", GGUF_MODULE, str(path), partial]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["the translation ended"])[-1]
            raise InvalidRequest.field("LORAPLEX_MODEL", path.name, why)
        with suppress(OSError):  # another worker was first
            Path(partial).rename(folder)
    return folder


def read_tokenizer(model_dir: Path) -> TokenizerBundle:
    """Read and check the tokenizer's files.

    A gateway retries a base whose tokenizer it cannot read, so the worker reads the files in the
    same way before it starts.

    Raises:
        InvalidRequest: they are unreasonably large, or one of them is damaged.
    """
    names = [name for name in TOKENIZER_FILES if (model_dir / name).is_file()]
    num_bytes = sum((model_dir / name).stat().st_size for name in names)
    if num_bytes > MAX_TOKENIZER_BYTES:
        raise InvalidRequest.field(
            "LORAPLEX_MODEL",
            str(model_dir),
            f"tokenizer files have {num_bytes} bytes, at most {MAX_TOKENIZER_BYTES} are served",
        )
    files = tuple((name, (model_dir / name).read_bytes()) for name in names)
    _check_files(dict(files))
    hasher = hashlib.sha256()
    for name, content in files:
        hasher.update(f"{name} {len(content)}\n".encode())
        hasher.update(content)
    generation = dict(files).get("generation_config.json", b"").decode()
    bos_token_id = _token_id(dict(files), "bos_token_id", ("generation_config.json", "config.json"))
    pad_token_id = _token_id(dict(files), "pad_token_id", ("config.json",))
    digest = f"sha256:{hasher.hexdigest()}"
    return TokenizerBundle(files, digest, generation, bos_token_id, pad_token_id)


def _check_files(files: dict[str, bytes]) -> None:
    """Raises InvalidRequest naming the first file that gateways could not read."""
    from tokenizers import Tokenizer

    name = ""
    try:
        for name in files:
            if name.endswith(".json") and not isinstance(json.loads(files[name].decode()), dict):
                raise ValueError("it holds no JSON object")
        if "tokenizer.json" in files:
            name = "tokenizer.json"
            Tokenizer.from_str(files[name].decode())
        name = "chat_template.jinja" if "chat_template.jinja" in files else "the chat template"
        if (chat := chat_format(files)) is not None:
            template_environment().compile(chat.template)
    except Exception as error:  # the libraries have no class of their own
        why = (
            f"{name} cannot be read ({str(error) or type(error).__name__}); "
            "copy or download the base again, or repair the file"
        )
        raise InvalidRequest.field("LORAPLEX_MODEL", name, why) from error


def _token_id(files: dict[str, bytes], key: str, names: Sequence[str]) -> int | None:
    """The token id that the first of the files to name one has."""
    for name in names:
        config = json.loads(files.get(name, b"{}"))
        value = config.get(key)
        if value is None:  # A multimodal base may say it of its text model.
            text_config = config.get("text_config")
            value = text_config.get(key) if isinstance(text_config, dict) else None
        if type(value) is int and value >= 0:
            return value
    return None


def _download(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError:
        raise Unsupported.field(
            "LORAPLEX_MODEL", model, "hub ids need the huggingface-hub package; give a folder"
        ) from None
    try:
        patterns, others = list(MODEL_FILES), list(OTHER_FORMATS)
        return Path(snapshot_download(model, allow_patterns=patterns, ignore_patterns=others))
    except LocalEntryNotFoundError as error:
        raise Unavailable(
            f"model {model!r} is not cached, and the hub cannot be reached; check the network, or "
            "name a folder"
        ) from error
    except WRONG_ANSWERS as error:
        raise Unavailable(f"model {model!r}: the hub gave an unexpected answer: {error}") from error
    except GatedRepoError as error:
        why = "is gated: accept its terms on the hub, and set HF_TOKEN"
        raise PermissionDenied(f"model {model!r} {why}") from error
    except RepositoryNotFoundError as error:
        why = f"{model!r} is not on the hub, or is private: check the name, or set HF_TOKEN"
        raise InvalidRequest.field("LORAPLEX_MODEL", model, why) from error
    except (HfHubHTTPError, ValueError) as error:
        raise InvalidRequest.field(
            "LORAPLEX_MODEL", model, "neither a folder nor a hub id that can be downloaded"
        ) from error

"""Converts a GGUF file to a folder in Hugging Face layout.

Names, config and tokenizer are translated, and the blocks of tensors are copied unchanged.

`python -m loraplex_services.worker.model.formats.gguf_folder FILE FOLDER` writes it, in a process
of its own: the API server process has neither the gguf library nor transformers.

Names and metadata keys are those of llama.cpp's converter. What is not known is refused by name.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from loraplex.adapter_format.quantisation import GGUF_BLOCKS
from loraplex.adapter_format.safetensors_header import encode_header
from loraplex.errors import InvalidRequest, LoraplexError, Unsupported

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architectures of GGUF that are served; the model families have the same names."""
PLAIN_TYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
"""GGUF's name of a type -> safetensors' name."""
_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_HARMLESS_KEYS = ("vocab_size", "rope.scaling.finetuned")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files of the original base that are copied if they are in the folder of the GGUF file."""
SPARE_MEMORY_BYTES = 4 << 30
"""Memory of the process in addition to that for the file. The gguf library believes the lengths of
lists: those of a file of 100 bytes would fill the machine."""
INSTALL = ".venv/bin/pip install 'gguf>=0.19,<1'"


class GgufFile:
    """Metadata and tensors of a file."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidRequest if it is damaged, Unsupported without the gguf library."""
        try:
            from gguf import GGUFReader
        except ImportError:
            why = f"needs the gguf library, which is not installed; run {INSTALL}"
            raise Unsupported.field("LORAPLEX_MODEL", path.name, why) from None
        try:
            reader = GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError, OverflowError) as error:
            why = f"is not a readable GGUF file: {error}"
            raise InvalidRequest.field("LORAPLEX_MODEL", path.name, why) from error
        self.path = path
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields
        self._seen: set[str] = set()
        if self.get("split.count", 1) > 1:
            raise self.refuse("split.count", self.get("split.count"), "merge the shards first")
        self.architecture: str = self.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            why = f"is not served from GGUF; known: {', '.join(ARCHITECTURES)}"
            raise self.refuse("general.architecture", self.architecture, why)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def own(self, key: str, default: Any = None) -> Any:
        """The value of one of the architecture's keys, which `check_keys` then takes as known.

        Raises Unsupported if it is missing and has no default, or if it differs between layers.
        """
        self._seen.add(f"{self.architecture}.{key}")
        value = self.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise self.refuse_own(key, None, "is missing")
        if isinstance(value, list):
            raise self.refuse_own(key, value, "must be the same in all layers")
        return value

    def check_keys(self) -> None:
        """Refuse keys of the architecture that were not read, because they may change the
        arithmetic."""
        known = {f"{self.architecture}.{key}" for key in _HARMLESS_KEYS} | self._seen
        for key in sorted(self._fields):
            if key.startswith(f"{self.architecture}.") and key not in known and self.get(key):
                raise self.refuse(key, self.get(key), "is not known to this build")

    def refuse_own(self, key: str, value: object, why: str) -> Unsupported:
        """The error for one of the architecture's keys."""
        return self.refuse(f"{self.architecture}.{key}", value, why)

    def refuse(self, key: str, value: object, why: str) -> Unsupported:
        """The error for a key or a tensor."""
        return Unsupported.field(f"{self.path.name}:{key}", value, why)


def config_of(file: GgufFile) -> dict[str, Any]:
    """config.json without its quantisation."""
    width, num_heads = file.own("embedding_length"), file.own("attention.head_count")
    head_dim = file.own("attention.key_length", width // max(1, num_heads))
    config = {
        "model_type": file.architecture,
        "hidden_size": width,
        "intermediate_size": file.own("feed_forward_length"),
        "num_hidden_layers": file.own("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.own("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.own("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.own(key, head_dim) != head_dim:
            why = f"must be {head_dim}, as attention.key_length is"
            raise file.refuse_own(key, file.own(key), why)
    config["rms_norm_eps"] = _shortest(file.own("attention.layer_norm_rms_epsilon"))
    config["rope_theta"] = _shortest(file.own("rope.freq_base", 10000.0))
    config["rope_scaling"] = _rope_scaling(file, config["max_position_embeddings"])
    if file.architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if (table := file.tensors.get("token_embd.weight")) is None:
        raise file.refuse("token_embd.weight", None, "is missing")
    config["vocab_size"] = len(table.data)
    ends = [file.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    config["eos_token_id"] = sorted({end for end in ends if end is not None})
    config["bos_token_id"] = file.get("tokenizer.ggml.bos_token_id")
    file.check_keys()
    return {key: value for key, value in config.items() if value is not None}


def _shortest(value: float) -> float:
    """The shortest decimal number with this float32 value, as people write it."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GgufFile, context: int) -> dict[str, Any] | None:
    kind = file.own("rope.scaling.type", "none")
    factor = _shortest(file.own("rope.scaling.factor", 1.0))
    original = file.own("rope.scaling.original_context_length", context)
    if kind not in ("none", "linear", "yarn"):
        why = "is not served; known: none, linear, yarn"
        raise file.refuse_own("rope.scaling.type", kind, why)
    if _ROPE_FACTORS in file.tensors:  # llama3's scaling: what each frequency is divided by
        factors = [float(value) for value in file.tensors[_ROPE_FACTORS].data]
        if kind != "none":
            raise file.refuse_own("rope.scaling.type", kind, f"does not fit {_ROPE_FACTORS}")
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    if kind == "none" or factor == 1:
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
    return scaling


def tensors_of(file: GgufFile) -> Iterator[tuple[str, str, tuple[int, ...], Any]]:
    """(Hugging Face's name, type, shape in that type's items, data) of each tensor.

    Raises Unsupported, naming a tensor that is not known, or one of a type that is not served.
    """
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        module, _, last = name.rpartition(".")
        own = _MODULES.get(module)
        if found := re.fullmatch(r"blk\.(\d+)\.(\w+)", module):
            inner = _LAYER_MODULES.get(found[2])
            own = f"model.layers.{found[1]}.{inner}" if inner else None
        if own is None or last not in ("weight", "bias"):
            raise file.refuse(name, None, "is a tensor that this build does not know")
        kind, data = tensor.tensor_type.name, tensor.data
        if kind not in PLAIN_TYPES and (f"gguf-{kind}" not in GGUF_BLOCKS or data.ndim != 2):
            known = ", ".join((*PLAIN_TYPES, *(k.removeprefix("gguf-") for k in GGUF_BLOCKS)))
            raise file.refuse(name, kind, f"is a type that is not served; known: {known}")
        if file.architecture == "llama" and _last_of(own) in ("q_proj", "k_proj"):
            data = _in_halves(file, _last_of(own), data)
        shape = tuple(data.shape)
        if kind == "BF16":  # numpy has none: two bytes each
            shape = (*shape[:-1], shape[-1] // 2)
        yield f"{own}.{last}", kind, shape, data


def _last_of(module: str) -> str:
    """The last part of a name."""
    return module.rpartition(".")[2]


def _in_halves(file: GgufFile, module: str, data: Any) -> Any:
    """Rows of each head with the first components of all rotated pairs first. llama.cpp stores the
    two components of a pair next to each other."""
    key = "attention.head_count" if module == "q_proj" else "attention.head_count_kv"
    num_heads = file.own(key, file.own("attention.head_count"))
    rows, rest = data.shape[0], data.shape[1:]
    if not isinstance(num_heads, int) or num_heads < 1 or rows % (2 * num_heads):
        why = f"must divide half of the {rows} rows of {module}"
        raise InvalidRequest.field(key, num_heads, why)
    pairs = data.reshape(num_heads, rows // num_heads // 2, 2, *rest)
    return pairs.swapaxes(1, 2).reshape(rows, *rest)


def write_folder(path: Path, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files.

    Raises:
        InvalidRequest, Unsupported: naming what this build does not serve.
    """
    file = GgufFile(path)
    config = config_of(file)
    tensors = list(tensors_of(file))
    modules: dict[str, list[str]] = defaultdict(list)
    for name, kind, _, _ in tensors:
        if kind not in PLAIN_TYPES:
            modules[kind].append(name.removesuffix(".weight"))
    if modules:
        config["quantization_config"] = {"quant_method": "gguf", "tensor_types": modules}
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(file, folder)
    _write_tensors(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _write_tensors(tensors: list[tuple[str, str, tuple[int, ...], Any]], path: Path) -> None:
    infos = ((name, PLAIN_TYPES.get(kind, "U8"), shape) for name, kind, shape, _ in tensors)
    with path.open("wb") as sink:
        sink.write(encode_header(infos))
        for _, _, _, data in tensors:
            sink.write(np.ascontiguousarray(data).data)


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    originals = [file.path.parent / name for name in _TOKENIZER_FILES]
    if originals[0].is_file():
        for source in originals:
            if source.is_file():
                shutil.copyfile(source, folder / source.name)
    else:
        _convert_tokenizer(file, folder)
    template = file.get("tokenizer.chat_template")
    if template and not (folder / "chat_template.jinja").exists():
        settings = folder / "tokenizer_config.json"
        if not settings.exists() or "chat_template" not in json.loads(settings.read_bytes()):
            (folder / "chat_template.jinja").write_text(template)


def _convert_tokenizer(file: GgufFile, folder: Path) -> None:
    way_out = "put the tokenizer.json of the original base next to the GGUF file"
    try:
        from transformers import AutoTokenizer
    except ImportError:
        why = f"is read by the transformers library, which is not installed; {way_out}"
        raise file.refuse("tokenizer.ggml", file.get("tokenizer.ggml.model"), why) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            file.path.parent, gguf_file=file.path.name, trust_remote_code=False
        )
        tokenizer.save_pretrained(folder)
    except Exception as error:  # of any kind, from many converters
        why = f"cannot be converted by the transformers library ({error}); {way_out}"
        raise file.refuse("tokenizer.ggml", file.get("tokenizer.ggml.model"), why) from error


def main() -> None:
    """Write the folder; the reason of a refusal is the last line of stderr, and the status is 3."""
    path, why = Path(sys.argv[1]), ""
    with contextlib.suppress(ValueError, OSError):  # no file, or a system without this limit
        most = 3 * path.stat().st_size + SPARE_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        write_folder(path, Path(sys.argv[2]))
    except LoraplexError as error:
        why = error.message.replace("\n", " ")
    except MemoryError:
        why = "it needs more memory than a file of its size may: it is damaged"
    if why:
        print(why, file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()

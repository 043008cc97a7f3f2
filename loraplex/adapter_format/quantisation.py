"""Reads how a base's `quantization_config` says that the weights of linears are stored.

Schemes that are known in part only are refused by name: what a reader does not know may change the
arithmetic. Which modules are stored in a scheme is what the files say: exceptions of a config
(`modules_to_not_convert`, `ignore`, embeddings, heads) lie in them as plain weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.errors import Unsupported

FIELD = "config.json:quantization_config"

GPTQ, AWQ, PACKED, PLAIN, BLOCKS, BNB4, BNB8 = (
    "gptq",
    "awq",
    "packed",
    "plain",
    "blocks",
    "bnb4",
    "bnb8",
)
"""Layouts of files. GPTQ and AWQ: `qweight`, `qzeros`, `scales`. Of compressed-tensors: PACKED =
`weight_packed`, PLAIN = one code for each byte of `weight`. BLOCKS = the same with a scale for each
block of rows and columns, `weight_scale_inv`. BNB4 and BNB8 = those of bitsandbytes."""
GGUF_BLOCKS = {
    "gguf-Q4_0": (4, 32, 18),
    "gguf-Q5_0": (5, 32, 22),
    "gguf-Q4_K": (4, 256, 144),
    "gguf-Q5_K": (5, 256, 176),
    "gguf-Q6_K": (6, 256, 210),
    "gguf-Q8_0": (8, 32, 34),
}
"""Layouts of GGUF files: bits of a code, inputs of a block, and bytes of a block, scales included.
A `weight` `[out, bytes]` of uint8 holds the blocks of each row as they are in the GGUF file."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weight of a linear is stored."""

    layout: str
    bits: int
    is_float: bool = False
    """Codes are float8 (e4m3); otherwise they are integers or, in BNB4, indices of a table."""
    group_size: int = 0
    """Number of inputs that share a scale; 0 = whole rows."""
    symmetric: bool = True
    """Whether there are no zero points."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, in BLOCKS."""
    zero_step: int = 0
    """The number that GPTQ adds to a stored zero point."""

    @property
    def name(self) -> str:
        """Name for logs and fingerprints, such as `gptq-int4-g128`."""
        kind = "float" if self.is_float or self.layout == BNB4 else "int"
        parts = [f"{self.layout}-{kind}{self.bits}"]
        if self.group_size:
            parts.append(f"g{self.group_size}")
        if self.block:
            parts.append("b{}x{}".format(*self.block))
        return "-".join(parts + ["asym"] * (not self.symmetric))


@dataclass(frozen=True, slots=True)
class Quantisation:
    """A base's `quantization_config`, parsed."""

    method: str
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    """(targets, scheme): names of modules, `re:` and a pattern, or a class; empty = every module.
    """
    kv_cache: str = ""
    """Type of keys and values in the KV cache, as `--kv-cache-dtype` names it; "" = the model's."""

    @property
    def name(self) -> str:
        """Name for logs and fingerprints."""
        return "+".join(sorted({scheme.name for _, scheme in self.schemes}))

    def scheme_of(self, module: str) -> Scheme | None:
        """The scheme of a linear whose weight the files hold in codes; None = the config has none
        for it."""
        named = [scheme for targets, scheme in self.schemes if _names(targets, module)]
        if named:
            return named[0]
        by_class = [s for targets, s in self.schemes if not targets or "Linear" in targets]
        return by_class[0] if by_class else None


def _names(targets: tuple[str, ...], module: str) -> bool:
    for target in targets:
        if target.startswith("re:"):
            if re.match(target.removeprefix("re:"), module):
                return True
        elif module == target or module.endswith("." + target):
            return True
    return False


def read_quantisation(config: Mapping[str, object]) -> Quantisation | None:
    """Read the quantisation of a config.json; None if weights are plain.

    Raises:
        Unsupported: naming the method, or the key that this build does not know.
    """
    raw = config.get("quantization_config")
    if raw is None or raw == {}:
        return None
    method = raw.get("quant_method") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(method, str) or method not in _METHODS:
        known = ", ".join(sorted(_METHODS))
        why = f"is not served; serve a copy in one of {known}, or the original with --quantization"
        raise Unsupported.field(FIELD, method, why)
    reader = _Keys({key: value for key, value in raw.items() if key != "quant_method"})
    schemes, kv_cache = _METHODS[method](reader), _kv_cache(reader)
    reader.finish()
    return Quantisation(method, schemes, kv_cache)


_HARMLESS = frozenset(
    """
    _load_in_4bit _load_in_8bit act_group_aware amp backend batch_size block_name_to_quantize
    bnb_4bit_compute_dtype bnb_4bit_use_double_quant cache_block_outputs damp_auto_increment
    damp_percent dataset dequantize disable_exllama do_fuse exllama_config failsafe fuse_max_seq_len
    global_compression_ratio hyb_act ignore ignored_layers lm_head
    llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_skip_modules
    llm_int8_threshold max_input_length meta model_file_base_name model_name_or_path model_seqlen
    module_name_preceding_first_block modules_in_block_to_quantize modules_to_fuse
    modules_to_not_convert mse observer observer_kwargs offload_to_disk output_activations
    input_activations pad_token_id quantization_status quantizer quant_state run_compressed
    static_groups tokenizer true_sequential use_cuda_fp16 use_exllama v2 version
    """.split()
)
"""Keys that say how codes were found, name exceptions that the files show, or quantise activations,
which are not quantised here."""


class _Keys:
    """Keys of one object; those that were not read are refused unless they have no effect."""

    def __init__(self, raw: dict[str, Any], field: str = FIELD) -> None:
        self.raw = raw
        self.field = field
        self._seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self._seen.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def expect(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        value = self.get(key, default)
        value = value.lower() if isinstance(value, str) else value
        if not any(value == choice and type(value) is type(choice) for choice in allowed):
            choices = ", ".join(map(repr, allowed))
            raise self.refuse(key, value, f"is not served; this build knows {choices}")
        return value

    def group_size(self, default: int) -> int:
        """0 = whole rows, which files write as -1."""
        value = self.get("group_size", default)
        if type(value) is not int or (value < 1 and value != -1):
            raise self.refuse(
                "group_size", value, "must be a positive integer, or -1 for whole rows"
            )
        return max(0, value)

    def refuse(self, key: str, value: object, why: str) -> Unsupported:
        return Unsupported.field(f"{self.field}.{key}", value, why)

    def finish(self) -> None:
        for key, value in self.raw.items():
            if key not in self._seen and key not in _HARMLESS and value not in _SAYS_NOTHING:
                raise self.refuse(key, value, "is not known to this build, and may change weights")


_SAYS_NOTHING: tuple[object, ...] = (None, False, [], {}, "")
Schemes = tuple[tuple[tuple[str, ...], Scheme], ...]


def _kv_cache(keys: _Keys) -> str:
    """See `Quantisation.kv_cache`. What a scheme says of its scales has no effect, because those of
    the KV cache are computed from the keys and values themselves."""
    scheme = keys.get("kv_cache_scheme")
    if scheme in (None, "static"):  # AutoFP8's word for scales in the files, without a type
        return ""
    if not isinstance(scheme, dict):
        raise keys.refuse("kv_cache_scheme", scheme, "must be an object")
    own = _Keys(scheme, f"{keys.field}.kv_cache_scheme")
    own.expect("num_bits", (8,), 8)
    return "fp8" if own.expect("type", ("int", "float"), "int") == "float" else "int8"


def _gptq(keys: _Keys) -> Schemes:
    bits = keys.expect("bits", (4, 8))
    group_size = keys.group_size(128)
    keys.get("desc_act")  # the files' `g_idx` says which columns share a scale
    keys.get("sym")  # the files hold zero points either way
    rules = keys.get("dynamic", {})
    if not isinstance(rules, dict):
        raise keys.refuse("dynamic", rules, "must be an object")
    for pattern, changes in rules.items():
        if changes and not pattern.startswith("-:"):  # that is an exception, which the files show
            raise keys.refuse("dynamic", {pattern: changes}, "changes the scheme of some modules")
    keys.expect("pack_dtype", ("int32",), "int32")
    layout = keys.expect("format", ("gptq", "gptq_v2"), "gptq")
    layout = keys.expect("checkpoint_format", ("gptq", "gptq_v2"), layout)
    return (((), Scheme(GPTQ, bits, False, group_size, False, zero_step=layout == "gptq")),)


def _awq(keys: _Keys) -> Schemes:
    bits = keys.expect("bits", (4,), keys.get("w_bit", 4))
    group_size = keys.group_size(keys.get("q_group_size", 128))
    keys.expect("zero_point", (True,), True)
    keys.expect("version", ("gemm",), keys.expect("format", ("gemm",), "gemm"))
    if keys.get("backend") == "llm-awq":
        raise keys.refuse("backend", "llm-awq", "is not served; this build knows version gemm")
    return (((), Scheme(AWQ, bits, False, group_size, False)),)


def _fp8(keys: _Keys) -> Schemes:
    keys.expect("activation_scheme", ("dynamic", "static"), "dynamic")
    keys.expect("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    keys.expect("scale_fmt", ("float", "ue8m0"), "float")
    keys.expect("expert_dtype", ("fp8",), "fp8")
    keys.get("modules_to_convert")  # the files show which were
    sizes = keys.get("weight_block_size")
    if sizes is None:
        return (((), Scheme(PLAIN, 8, is_float=True)),)
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(_is_positive(s) for s in sizes):
        raise keys.refuse("weight_block_size", sizes, "must be two positive integers")
    return (((), Scheme(BLOCKS, 8, is_float=True, block=(sizes[0], sizes[1]))),)


def _is_positive(value: object) -> bool:
    return type(value) is int and value > 0


def _bitsandbytes(keys: _Keys) -> Schemes:
    in_four = keys.expect("load_in_4bit", (True, False), False)
    in_eight = keys.expect("load_in_8bit", (True, False), False)
    if in_four == in_eight:
        raise keys.refuse("load_in_4bit", in_four, "must differ from load_in_8bit")
    keys.expect("bnb_4bit_quant_storage", ("uint8",), "uint8")
    quant_type = keys.expect("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    del quant_type  # the table is in the files
    return (((), Scheme(BNB4, 4, is_float=True) if in_four else Scheme(BNB8, 8)),)


_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")


def _compressed(keys: _Keys) -> Schemes:
    """Read the format compressed-tensors: one scheme for each of its groups."""
    layout = keys.expect("format", (*_FORMATS, "mixed-precision"))
    keys.expect("quantization_status", ("compressed", "frozen"), "compressed")
    sparsity = keys.get("sparsity_config", {})
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise keys.refuse("sparsity_config", sparsity, "is not served; only dense is")
    groups = keys.get("config_groups", {})
    if not isinstance(groups, dict) or not groups:
        raise keys.refuse("config_groups", groups, "must be an object with a group")
    found = []
    for name, group in groups.items():
        field = f"{keys.field}.config_groups.{name}"
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise Unsupported.field(field, group, "has no weights that are quantised")
        own = _Keys(group, field)
        targets = _targets(own)
        weights = _Keys(own.get("weights"), f"{field}.weights")
        stored = own.expect("format", _FORMATS, None if layout == "mixed-precision" else layout)
        own.finish()
        found.append((targets, _compressed_scheme(weights, stored)))
    return tuple(found)


def _targets(group: _Keys) -> tuple[str, ...]:
    """Names of modules, patterns after `re:`, or classes."""
    targets = group.get("targets", [])
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise group.refuse("targets", targets, "must be a list of names")
    for target in (target for target in targets if target.startswith("re:")):
        try:
            re.compile(target.removeprefix("re:"))
        except re.error as error:
            raise group.refuse("targets", target, f"is not a valid pattern: {error}") from error
    return tuple(targets)


def _compressed_scheme(weights: _Keys, stored: str) -> Scheme:
    kind = weights.expect("type", ("int", "float"), "int")
    bits = weights.expect("num_bits", (4, 8) if kind == "int" else (8,), 8)
    weights.expect("dynamic", (False,), False)
    weights.get("actorder")  # `weight_g_idx` in the files says which columns share a scale
    for key in ("scale_dtype", "zp_dtype"):
        weights.get(key)  # of tensors, which say it themselves
    strategy = weights.expect("strategy", ("tensor", "channel", "group", "block"), "channel")
    group_size = weights.group_size(-1)
    sizes = weights.get("block_structure")
    block = None
    if strategy == "block":
        if not isinstance(sizes, list) or len(sizes) != 2 or not all(map(_is_positive, sizes)):
            raise weights.refuse("block_structure", sizes, "must be two positive integers")
        block = sizes[0], sizes[1]
    elif (strategy == "group") != (group_size > 0):
        raise weights.refuse("group_size", group_size, f"does not fit the strategy {strategy}")
    symmetric = weights.expect("symmetric", (True, False), True)
    weights.finish()
    if stored == "pack-quantized" and kind == "float":
        raise weights.refuse("type", kind, "is not served in pack-quantized")
    if not symmetric and strategy in ("tensor", "block"):
        raise weights.refuse("symmetric", False, f"is not served with the strategy {strategy}")
    layout = PACKED if stored == "pack-quantized" else PLAIN
    if layout == PLAIN and bits != 8:
        raise weights.refuse("num_bits", bits, f"is not served in {stored}")
    return Scheme(layout, bits, kind == "float", group_size, symmetric, block)


def _gguf(keys: _Keys) -> Schemes:
    """The modules of each tensor type, in a folder that a worker made of a GGUF file."""
    found = []
    for kind, modules in keys.get("tensor_types", {}).items():
        layout = f"gguf-{kind}"
        if layout not in GGUF_BLOCKS:
            raise keys.refuse("tensor_types", kind, "is not served")
        found.append((tuple(modules), Scheme(layout, GGUF_BLOCKS[layout][0])))
    return tuple(found)


_METHODS: Mapping[str, Callable[[_Keys], Schemes]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gguf": _gguf,
    "gptq": _gptq,
}
"""Readers by `quant_method`. MXFP4 is a part of its model family."""

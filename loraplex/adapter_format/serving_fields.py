"""Fields that decoding an adapter depends on and that PEFT lacks: its rotary embedding and its EOS
ids.

A label and `generation_config.json` give them, not PEFT's config. They become fields of
adapter_config.json here, before anything else reads it, and so are part of the adapter's identity.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from loraplex.adapter_format import rope_scaling
from loraplex.adapter_format.config_reader import AdapterConfigReader, is_index_list
from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.rope_scaling import RopeScaling
from loraplex.adapter_format.strict_json import read_object
from loraplex.errors import InvalidAdapter

ROPE_FIELD = rope_scaling.FIELD
EOS_FIELD = "eos_token_id"
GENERATION_FILE = "generation_config.json"
MAX_GENERATION_BYTES = 1024 * 1024
MAX_EOS_IDS = 64
_MAX_CONFIG_BYTES = 1024 * 1024


def complete_config(
    config_bytes: bytes, *, generation_config: bytes | None = None, rope_label: str = ""
) -> bytes:
    """adapter_config.json with these fields added; the same bytes if there are none.

    Args:
        config_bytes: as uploaded; anything else is left for `parse_config` to refuse.
        generation_config: content of generation_config.json, of which only the EOS ids count.
        rope_label: value of the label `rope_scaling`.

    Raises:
        InvalidAdapter: the file or the label is wrong, or contradicts the config.
    """
    fields_given: dict[str, object] = {}
    if generation_config is not None:
        fields_given[EOS_FIELD] = _eos_of(generation_config)
    if rope_label:
        fields_given[ROPE_FIELD] = rope_scaling.parse(rope_label).to_fields()
    fields_given = {field: value for field, value in fields_given.items() if value is not None}
    try:
        fields = read_object(config_bytes, "adapter_config.json", _MAX_CONFIG_BYTES)
    except InvalidAdapter:
        return config_bytes
    for field, value in fields_given.items():
        if fields.get(field) is not None and fields[field] != value:
            source = GENERATION_FILE if field == EOS_FIELD else f"the label {ROPE_FIELD}"
            description = f"is another value than that of {source}; keep one of them"
            raise InvalidAdapter.field(f"adapter_config.json:{field}", fields[field], description)
    return json.dumps({**fields, **fields_given}).encode() if fields_given else config_bytes


def read_rope_scaling(reader: AdapterConfigReader) -> RopeScaling | None:
    """Read the field of a config."""
    value = reader.fields.get(ROPE_FIELD)
    if value is None:
        return None
    try:
        return rope_scaling.read(value)
    except InvalidAdapter as error:
        for violation in error.violations:
            reader.refuse(violation.field, violation.value, violation.description)
        return None


def read_eos_token_ids(reader: AdapterConfigReader) -> tuple[int, ...]:
    """Read the field of a config: one id or a list of ids."""
    value = reader.fields.get(EOS_FIELD)
    ids = _ids(value)
    if ids is None:
        reader.refuse(EOS_FIELD, value, f"must be a token id or a list of 1 to {MAX_EOS_IDS}")
        return ()
    return tuple(ids)


def check_rope_scaling(scaling: RopeScaling | None, num_pairs: int, findings: Findings) -> None:
    """Refuse factors whose number is not that of the rotated pairs.

    Args:
        num_pairs: of the base; 0 = not known.
    """
    lists = [(key, value) for key, value in (scaling.params if scaling else ())
             if isinstance(value, tuple)]  # fmt: skip
    for key, value in lists:
        if num_pairs and len(value) != num_pairs:
            description = f"must be a list of {num_pairs} numbers, one for each pair"
            findings.refuse(f"{ROPE_FIELD}.{key}", f"{len(value)} numbers", description)


def check_eos_token_ids(
    eos_token_ids: Sequence[int], vocab_size: int, table_sizes: Iterable[int], findings: Findings
) -> None:
    """Refuse ids that the adapter's model never samples.

    Args:
        table_sizes: rows of the adapter's own tables; 0 if it has none.
    """
    own_sizes = [size for size in table_sizes if size]
    limit = own_sizes[0] if own_sizes else vocab_size
    for token_id in eos_token_ids:
        if token_id >= limit:
            description = f"token ids go from 0 to {limit - 1} with this adapter"
            findings.refuse(f"{GENERATION_FILE}:{EOS_FIELD}", token_id, description)


def _eos_of(generation_config: bytes) -> list[int] | None:
    fields = read_object(generation_config, GENERATION_FILE, MAX_GENERATION_BYTES)
    ids = _ids(fields.get(EOS_FIELD))
    if ids is None:
        description = f"must be a token id, a list of 1 to {MAX_EOS_IDS}, or null (the base's)"
        raise InvalidAdapter.field(f"{GENERATION_FILE}:{EOS_FIELD}", fields[EOS_FIELD], description)
    return ids or None


def _ids(value: object) -> list[int] | None:
    """The ids, sorted and without duplicates; empty for null, None for anything else."""
    ids = [value] if type(value) is int else value
    if ids is None:
        return []
    if not is_index_list(ids) or not 0 < len(ids) <= MAX_EOS_IDS:
        return None
    return sorted(set(ids))

"""How vectors and scores are computed with an adapter; PEFT has no fields for it.

The names are those of transformers' config (`id2label`, `num_labels`, `problem_type`,
`pad_token_id`), next to `pooling` and `normalize` for embeddings. They are optional fields of
adapter_config.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.adapter_format.config_reader import AdapterConfigReader
from loraplex.adapter_format.findings import Findings
from loraplex.adapter_format.tasks import SEQ_CLS
from loraplex.units import counted

LAST, MEAN = "last", "mean"
SINGLE_LABEL, MULTI_LABEL, REGRESSION = (
    "single_label_classification",
    "multi_label_classification",
    "regression",
)
HEAD_FIELDS = ("id2label", "num_labels", "problem_type", "pad_token_id")
FIELDS = frozenset({*HEAD_FIELDS, "pooling", "normalize"})
MAX_LABEL_CHARS = 256
MAX_ALL_LABELS_CHARS = 64 * 1024
"""Every gateway keeps the names of all versions."""
_MAX_TOKEN_ID = 2**31


@dataclass(frozen=True, slots=True)
class PoolingFields:
    """Fields of a config about vectors and scores; the defaults are those of transformers."""

    labels: tuple[str, ...] = ()
    """Names of the head's outputs; empty means LABEL_0, LABEL_1..."""
    num_labels: int = 0
    """Number of labels; 0 = that of the head."""
    problem_type: str = ""
    """One of the constants above; "" = single label, or the sigmoid of a single output."""
    pad_token_id: int | None = None
    """Padding id; trailing ones are not scored. None = the base's."""
    pooling: str = ""
    """`last` or `mean`; "" = last."""
    normalize: bool | None = None
    """Whether vectors are scaled to length 1; None = yes."""

    def to_fields(self) -> dict[str, object]:
        """The fields of the file; only those that are set."""
        named = {str(index): label for index, label in enumerate(self.labels)}
        fields: dict[str, object] = {
            "id2label": named or None,
            "normalize": self.normalize,
            "num_labels": self.num_labels or None,
            "pad_token_id": self.pad_token_id,
            "pooling": self.pooling or None,
            "problem_type": self.problem_type or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


def read_pooling(reader: AdapterConfigReader) -> PoolingFields:
    """The fields of a config, each checked separately."""
    if reader.fields.get("task_type") != SEQ_CLS:
        for name in HEAD_FIELDS:
            if reader.fields.get(name) is not None:
                reader.refuse(name, reader.fields[name], f"is for adapters of task_type {SEQ_CLS}")
    normalize = reader.fields.get("normalize")
    return PoolingFields(
        labels=_labels(reader),
        num_labels=_integer(reader, "num_labels", 1) or 0,
        problem_type=_one_of(reader, "problem_type", (SINGLE_LABEL, MULTI_LABEL, REGRESSION)),
        pad_token_id=_integer(reader, "pad_token_id", 0),
        pooling=_one_of(reader, "pooling", (LAST, MEAN)),
        normalize=None if normalize is None else reader.flag("normalize"),
    )


def check_labels(fields: PoolingFields, num_labels: int, findings: Findings, source: str) -> None:
    """Refuse names and counts that are not the head's."""
    for name, count in (("id2label", len(fields.labels)), ("num_labels", fields.num_labels)):
        if count and count != num_labels:
            why = f"is for {counted(count, 'label')}, but the head has {num_labels}"
            findings.refuse(f"{source}:{name}", count, why)


def _labels(reader: AdapterConfigReader) -> tuple[str, ...]:
    value = reader.fields.get("id2label")
    if value is None:
        return ()
    names = [value.get(str(i)) for i in range(len(value))] if isinstance(value, dict) else []
    if not names or not all(isinstance(n, str) and 0 < len(n) <= MAX_LABEL_CHARS for n in names):
        why = f'must name every label "0", "1"... in at most {MAX_LABEL_CHARS} characters'
        reader.refuse("id2label", value, why)
        return ()
    labels = tuple(str(name) for name in names)
    if sum(map(len, labels)) > MAX_ALL_LABELS_CHARS:
        why = f"the names have more than {MAX_ALL_LABELS_CHARS} characters together; shorten them"
        reader.refuse("id2label", f"{len(labels)} labels", why)
        return ()
    return labels


def _integer(reader: AdapterConfigReader, name: str, least: int) -> int | None:
    value = reader.fields.get(name)
    if value is None or (type(value) is int and least <= value < _MAX_TOKEN_ID):
        return value
    reader.refuse(name, value, f"must be an integer from {least}, or null")
    return None


def _one_of(reader: AdapterConfigReader, name: str, known: Sequence[str]) -> str:
    value = reader.fields.get(name)
    if value is None:
        return ""
    if isinstance(value, str) and value in known:
        return value
    reader.refuse(name, value, f"must be {', '.join(known)} or null")
    return ""

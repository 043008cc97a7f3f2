"""Files that trainers and hubs write next to an adapter and that are not uploaded.

Only names are looked at; none of these files is opened. A name that may be that of weights, or that
is not known to be harmless, is in neither table, and `files.name_problem` refuses it.
"""

from __future__ import annotations

import re

_FLAGS = re.ASCII | re.IGNORECASE
_FILES: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"training_args\.(bin|json)|(optimizer|scheduler|scaler)\.(pt|bin)"
            r"|rng_state(_\d+)?\.pth|(trainer|tokens)_state\.json|trainer_log\.jsonl"
            r"|(all|train|eval|predict|test)_results\.json|latest|zero_to_fp32\.py"
            # ms-swift's arguments, and its fields of LoRA that PEFT lacks, all for training
            r"|(sft_)?args\.json|additional_config\.json|events\.out\.tfevents\..*",
            _FLAGS,
        ),
        "is the state of a training, which decoding does not need",
    ),
    (
        re.compile(
            r"config(uration)?\.json|modules\.json|sentence_bert_config\.json"
            r"|config_sentence_transformers\.json|(video_)?(pre)?processor_config\.json",
            _FLAGS,
        ),
        "describes the base or a pipeline around it; the base's own is used",
    ),
    (
        re.compile(r"vocab\.txt|spiece\.model|sentencepiece\.bpe\.model|tekken\.json", re.ASCII),
        "is a tokenizer file that is not read; tokenizer.json is",
    ),
    (
        re.compile(
            r".*\.(md|txt|rst|png|jpe?g|gif|svg|webp|pdf|html?|csv|tsv|jsonl|log|ya?ml|toml|ipynb)"
            r"|(LICENSE|NOTICE|USE_POLICY)(\..*)?",
            _FLAGS,
        ),
        "is not needed for decoding",
    ),
)
_FOLDERS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"checkpoint-\d+", re.ASCII),
        "is a checkpoint of the training; to publish it, upload that folder",
    ),
    (
        re.compile(
            r"global_step\d+|runs|logs?|wandb|mlruns|tensorboard|events|completions"
            r"|(pytorch_model_fsdp|optimizer)_\d+",
            re.ASCII,
        ),
        "is the state of a training, which decoding does not need",
    ),
    (
        re.compile(r"images|assets|figures|plots|media|samples|eval", re.ASCII),
        "is not needed for decoding",
    ),
    (
        re.compile(r"additional_chat_templates", re.ASCII),
        "has chat templates that are not read; chat_template.jinja is",
    ),
    (
        re.compile(r"\d+_(Pooling|Normalize|Transformer)", re.ASCII),
        "is a step of sentence-transformers; adapter_config.json says the same",
    ),
)


_LEFT_OUT = "; it is left out"
HARMLESS = frozenset(f"{reason}{_LEFT_OUT}" for _, reason in (*_FILES, *_FOLDERS))
"""Reasons that do not require any action of a publisher."""


def file_left_out(name: str) -> str | None:
    """Why a file of this name is not uploaded; None if its name does not exclude it."""
    return _match(_FILES, name)


def folder_left_out(name: str) -> str | None:
    """Why a folder of this name is not uploaded; None if its name does not exclude it."""
    return _match(_FOLDERS, name)


def _match(table: tuple[tuple[re.Pattern[str], str], ...], name: str) -> str | None:
    reason = next((reason for pattern, reason in table if pattern.fullmatch(name)), None)
    return f"{reason}{_LEFT_OUT}" if reason else None

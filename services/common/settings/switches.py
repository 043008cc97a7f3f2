"""The table of the switches of LORAPLEX_DEBUG, which are for developers and tests."""

from __future__ import annotations

from pathlib import Path

from loraplex.units import parse_seconds
from loraplex_services.common.settings.setting import Switch, choice_switch
from loraplex_services.common.units import choice, parse_bool, parse_text

LOG_LEVEL: Switch[str] = Switch(
    "log-level",
    choice("debug", "info", "warning", "error"),
    "info",
    "up all",
    "Lowest level that is logged.",
)
LOG_FORMAT = choice_switch(
    "log-format",
    "auto json text",
    "up all",
    "`auto` = text on a terminal, JSON lines elsewhere.",
)
LOAD_FORMAT = choice_switch(
    "load-format",
    "auto dummy",
    "worker",
    "`dummy` = random weights in the shape of the model's config, for benchmarks.",
)
OVERLAP = choice_switch(
    "overlap",
    "auto on off",
    "worker",
    "Plan a step while the previous one runs; `auto` = on GPUs.",
)
PREFIX_CACHE: Switch[bool] = Switch(
    "prefix-cache",
    parse_bool,
    True,
    "worker",
    "Keep the KV cache of finished requests for prompts with the same beginning.",
)
_MEANS = "Compute likely tokens ahead and verify them; on CPUs, where it pays. No output changes."
SPECULATION: Switch[bool] = Switch("speculation", parse_bool, True, "worker", _MEANS)
STEP_TIMEOUT_S: Switch[float] = Switch(
    "step-timeout-s",
    parse_seconds,
    120.0,
    "worker",
    "Time without a report after which an engine is restarted, in seconds.",
)
STEP_TRACE: Switch[Path | None] = Switch(
    "step-trace",
    Path,
    None,
    "worker",
    "File to which one line per step is written, to fit a simulation.",
)
GC_INTERVAL_S: Switch[float] = Switch(
    "gc-interval-s",
    parse_seconds,
    86_400.0,
    "registry",
    "Interval between garbage collections, in seconds; 0 = only `registry gc`.",
)
FAILPOINT = Switch(
    "failpoint",
    parse_text,
    "",
    "registry",
    "Step of a publication at which the process dies, STEP or STEP:COUNT, for tests.",
)
TOOL_CALL_PARSER = choice_switch(
    "tool-call-parser",
    "auto hermes llama3_json mistral qwen3_coder phi4_mini_json pythonic glm gemma4 harmony none",
    "gateway",
    "Notation of tool calls; `auto` = the one that the chat template shows.",
)
REASONING_PARSER = choice_switch(
    "reasoning-parser",
    "auto think none",
    "gateway",
    "Whether the text in `<think>` becomes reasoning; `auto` = if the chat template has that mark.",
)
REPLACE_BASES: Switch[bool] = Switch(
    "replace-bases",
    parse_bool,
    False,
    "gateway",
    "Let a served base replace a registered one of the same id; `loraplex up` sets it.",
)

ALL_SWITCHES = tuple(value for value in globals().values() if isinstance(value, Switch))

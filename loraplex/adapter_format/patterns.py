"""PEFT's own rules for which modules a config selects, with which rank and alpha.

Source: peft, `tuners_utils.check_target_module_exists`, `utils.other.get_pattern_key`. Lists match
by suffix, strings are regular expressions, the first matching key of a pattern map wins. Patterns
run on our bounded matcher; plain names, which cannot backtrack, run on `re`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from loraplex.adapter_format import regex
from loraplex.adapter_format.geometry import LINEAR, Module
from loraplex.adapter_format.regex_parser import parse

Names = str | tuple[str, ...]
"""How PEFT names modules: a regular expression, or suffixes of module names."""

T = TypeVar("T")
Matches = Callable[[str], bool]

ALL_LINEAR = "all-linear"
PLAIN_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*", re.ASCII)

_FIRST_NUMBER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")

DEFAULT_TARGETS: dict[str, tuple[str, ...]] = {
    "falcon": ("query_key_value",),
    "gemma": ("q_proj", "v_proj"),
    "gemma2": ("q_proj", "v_proj"),
    "gemma3_text": ("q_proj", "v_proj"),
    "gpt2": ("c_attn",),
    "gpt_neox": ("query_key_value",),
    "llama": ("q_proj", "v_proj"),
    "mistral": ("q_proj", "v_proj"),
    "mixtral": ("q_proj", "v_proj"),
    "opt": ("q_proj", "v_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "qwen2": ("q_proj", "v_proj"),
    "qwen3": ("q_proj", "v_proj"),
}
"""The modules that PEFT targets when the config names none."""


def has_expressions(fields: Mapping[str, object]) -> bool:
    """Whether a config, which may be wrong, selects modules by regular expressions."""
    targets = (fields.get(field) for field in ("target_modules", "exclude_modules"))
    if any(isinstance(value, str) and value.lower() != ALL_LINEAR for value in targets):
        return True
    maps = (fields.get(field) for field in ("rank_pattern", "alpha_pattern"))
    keys = (key for value in maps if isinstance(value, dict) for key in value)
    return not all(map(PLAIN_NAME.fullmatch, keys))


@dataclass(frozen=True, slots=True)
class Selector:
    """The fields of a config that say which modules get LoRA."""

    targets: str | frozenset[str]
    """A regular expression or suffixes."""
    excluded: str | frozenset[str] = frozenset()
    saved: tuple[str, ...] = ()
    """`modules_to_save`: these modules, and all inside them, get no LoRA."""
    layers: frozenset[int] = frozenset()
    """Empty = all layers."""
    layers_pattern: tuple[str, ...] = ()
    """Plain names of module lists; empty = any."""
    work: regex.Work = field(default_factory=regex.Work)
    parsed: dict[str, regex.Node] = field(default_factory=dict)

    def selects(self, name: str, module: Module | None = None) -> bool:
        """Whether PEFT would put LoRA on a module.

        Args:
            name: full module name without `base_model.model.`.
            module: the module in the base's geometry; None without a geometry.

        Raises:
            BadPattern: the patterns take too long.
        """
        if self.excluded and self._matches(self.excluded, name):
            return False
        if any(self._matches_pattern(pattern_of_saved(saved), name) for saved in self.saved):
            return False
        if isinstance(self.targets, str):
            if self.targets.lower() == ALL_LINEAR:
                return module is None or module.kind == LINEAR
            return regex.matches_all(self._node(self.targets), name, self.work)
        if name in self.targets:
            return True
        return _has_suffix(self.targets, name) and self._layer_is_selected(name)

    def _matches(self, names: str | frozenset[str], name: str) -> bool:
        if isinstance(names, str):
            return regex.matches_all(self._node(names), name, self.work)
        return name in names or _has_suffix(names, name)

    def _matches_pattern(self, pattern: str, name: str) -> bool:
        return regex.matches_start(self._node(pattern), name, self.work)

    def _node(self, pattern: str) -> regex.Node:
        node = self.parsed.get(pattern)
        if node is None:
            node = self.parsed[pattern] = parse(pattern)
        return node

    def _layer_is_selected(self, name: str) -> bool:
        if not self.layers:
            return True
        match = _layer_match(self.layers_pattern, name)
        return match is not None and int(match["idx"]) in self.layers


@dataclass(frozen=True, slots=True)
class PatternMap(Generic[T]):
    """A rank or alpha pattern, compiled once for all modules."""

    entries: tuple[tuple[Matches, T], ...]
    work: regex.Work

    def first_match(self, name: str) -> T | None:
        """The value of the first key that covers a module.

        Raises:
            BadPattern: the keys take too long.
        """
        for matches, value in self.entries:
            self.work.spend(1)
            if matches(name):
                return value
        return None


def pattern_map(pairs: Iterable[tuple[str, T]]) -> PatternMap[T]:
    """Compile the pairs of a rank or alpha pattern.

    Raises:
        BadPattern: a key is not accepted.
    """
    work = regex.Work()
    return PatternMap(tuple((_matcher(key, work), value) for key, value in pairs), work)


def _matcher(key: str, work: regex.Work) -> Matches:
    if not PLAIN_NAME.fullmatch(key):
        node = parse(pattern_of_key(key))
        return lambda name: regex.matches_start(node, name, work)
    expression, num_chars = re.compile(key), len(key)

    def matches(name: str) -> bool:
        """A plain name covers the end of a name, after a dot or whole; its dots cover anything."""
        begin = len(name) - num_chars
        is_whole_part = begin == 0 or (begin > 0 and name[begin - 1] == ".")
        return is_whole_part and expression.fullmatch(name, begin) is not None

    return matches


def pattern_of_key(key: str) -> str:
    """The expression that PEFT makes of a key of `rank_pattern` or `alpha_pattern`."""
    return rf"(.*\.)?({key})$"


def pattern_of_saved(module: str) -> str:
    """The expression that PEFT makes of an entry of `modules_to_save`."""
    return rf"(^|.*\.){module}($|\..*)"


def _has_suffix(suffixes: frozenset[str], name: str) -> bool:
    """Whether a proper end of `name`, after a dot, is in the set."""
    position = name.find(".")
    while position >= 0:
        if name[position + 1 :] in suffixes:
            return True
        position = name.find(".", position + 1)
    return False


def _layer_match(layers_pattern: tuple[str, ...], name: str) -> re.Match[str] | None:
    """Where the index of a layer stands. The patterns are plain names, so `re` is safe here."""
    if not layers_pattern:
        return _FIRST_NUMBER.match(name)
    for pattern in layers_pattern:
        match = re.match(rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.", name)
        if match:
            return match
    return None

"""Hypothesis strategies: expressions of the accepted kind and around it, module names, configs."""

from __future__ import annotations

from hypothesis import strategies as st

LETTERS = "ab.1_"

_ATOMS = st.sampled_from(
    r"a b 1 _ . \. \d \w \s \D \W \S [ab] [^a] [a-b1] [\d_] []a] [a-] \b \B ^ $ \A \Z \-".split(" ")
)
_SUFFIXES = st.sampled_from(["", "", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{0,2}", "{1,}"])
_OPENINGS = st.sampled_from(["(", "(?:", "(?=", "(?!", "(?<=", "(?<!", "(?P<x>"])


def patterns() -> st.SearchStrategy[str]:
    """Expressions, most of them accepted."""
    return st.recursive(
        st.builds("{}{}".format, _ATOMS, _SUFFIXES),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4).map("".join),
            st.lists(inner, min_size=1, max_size=3).map("|".join),
            st.builds("{}{}){}".format, _OPENINGS, inner, _SUFFIXES),
        ),
        max_leaves=8,
    )


def noisy_patterns() -> st.SearchStrategy[str]:
    """Any sequence of characters that mean something in an expression."""
    return st.text(alphabet="ab.*+?|()[]{}^$\\,-:=!<>P1d&~#", max_size=12)


def texts() -> st.SearchStrategy[str]:
    """Short texts over few letters, so that patterns match often."""
    return st.text(alphabet=LETTERS + "\n", max_size=10)


_PARTS = ["model", "layers", "h", "0", "1", "12", "self_attn", "mlp", "experts", "q_proj", "v_proj"]


def module_names() -> st.SearchStrategy[str]:
    """Names in the manner of `model.layers.0.self_attn.q_proj`."""
    return st.lists(st.sampled_from(_PARTS), min_size=1, max_size=7).map(".".join)


def suffixes() -> st.SearchStrategy[list[str]]:
    """Lists for `target_modules` and its kin."""
    name = st.lists(st.sampled_from(_PARTS), min_size=1, max_size=3).map(".".join)
    return st.lists(name, min_size=1, max_size=4)


def name_patterns() -> st.SearchStrategy[str]:
    """Expressions over module names."""
    part = st.sampled_from(_PARTS)
    chunk = st.one_of(
        part,
        part.map(lambda name: name.replace("_", ".")),
        st.sampled_from([r"\.", ".*", ".", r"\d+", "[01]", ".*?", r"\.\d\.", "^", "$", ".+"]),
        st.lists(part, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        part.map(lambda name: f"(?!.*{name})"),
    )
    return st.lists(chunk, min_size=1, max_size=6).map("".join)

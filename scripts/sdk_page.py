"""Write docs/reference/sdk.md from the docstrings of the public classes.

python scripts/sdk_page.py
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "sdk.md"
INTRODUCTION = """\
# Client library

The package `loraplex` without extras is the client library. It needs grpcio and protobuf only: `pip
install ./client` in a clone. `InferenceClient` calls a gateway, and `RegistryClient` a registry, as
its commands do. Both are asynchronous, and each has a blocking form. A prompt is text, token ids,
or a list of `Message`:

```python
from loraplex import BlockingInference, Grammar, Sampling

with BlockingInference("127.0.0.1:50051") as client:
    client.complete(
        "support:prod", "Is it up?", Sampling(grammar=Grammar(choice=["yes", "no"]))
    ).text
    client.embed("search:prod", ["a text", "another"], pooling="mean").vectors
    for score in client.score("toxicity:prod", ["have a nice day"]):
        print(score.label, score.probabilities, score.logits)
```

Every failure is a subclass of `LoraplexError` ([errors by
reason](../operate/runbooks.md#errors-by-reason)). `scripts/sdk_page.py` writes this page from the
docstrings: the clients first, then the types that they take and return.
"""
BLOCKING = {"BlockingInference": "InferenceClient", "BlockingRegistry": "RegistryClient"}
"""Blocking classes, and the classes whose methods they have."""


def page() -> str:
    """The page in Markdown."""
    sys.path.insert(0, str(ROOT))
    import loraplex

    clients = [*BLOCKING.values(), *BLOCKING]
    types = [name for name in loraplex.__all__ if name not in clients]
    classes = [getattr(loraplex, name) for name in (*clients, *types)]
    sections = ["\n".join(_section(cls)) for cls in classes]
    return f"{INTRODUCTION}\n" + "\n\n".join(sections) + "\n"


def _section(cls: type) -> Iterator[str]:
    yield f"## {cls.__name__}\n\n{inspect.getdoc(cls)}"
    if dataclasses.is_dataclass(cls):
        fields = ", ".join(
            f"`{each.name}: {_shown(each.type)}`" for each in dataclasses.fields(cls)
        )
        yield f"\nFields: {fields}"
    elif "__init__" in vars(cls) and not issubclass(cls, BaseException):
        arguments, _, _ = _signature(cls.__init__).rpartition(" -> ")
        yield f"\n```python\n{cls.__name__}{arguments}\n```"
        if described := vars(cls)["__init__"].__doc__:
            yield f"\n{inspect.cleandoc(described)}"
    if asynchronous := BLOCKING.get(cls.__name__):
        names = ", ".join(f"`{name}`" for name, _ in _methods(cls))
        yield f"\nMethods of [{asynchronous}](#{asynchronous.lower()}) without `await`: {names}."
        return
    for name, member in _methods(cls):
        prefix = "async " if inspect.iscoroutinefunction(member) else ""
        yield f"\n### {cls.__name__}.{name}\n\n```python\n{prefix}{name}{_signature(member)}\n```\n"
        yield _described(inspect.getdoc(member) or "")


def _signature(member: Any) -> str:
    """One parameter a line, without `self`."""
    signature = inspect.signature(member)
    lines, is_keyword = [], False
    for parameter in list(signature.parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            lines.append("*")
            is_keyword = True
        line = f"{parameter.name}: {_shown(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            line += f" = {_default(parameter.default)}"
        lines.append(line)
    inner = "".join(f"    {line},\n" for line in lines)
    shown = f"(\n{inner})" if lines else "()"
    return f"{shown} -> {_shown(signature.return_annotation)}"


def _default(value: object) -> str:
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}()"
    if isinstance(value, enum.Enum):
        return repr(value.value)
    return getattr(value, "__name__", repr(value))


def _described(docstring: str) -> str:
    """Sections of a docstring as lists."""
    lines = []
    for line in docstring.splitlines():
        if line.startswith("        "):
            lines.append(f"  {line.strip()}")
        elif line.startswith("    "):
            name, _, rest = line.strip().partition(": ")
            lines.append(f"- `{name}`: {rest}" if rest else f"- {line.strip()}")
        else:
            lines.append(f"{line}\n" if line in ("Args:", "Raises:", "Returns:") else line)
    return "\n".join(lines)


def _methods(cls: type) -> Iterator[tuple[str, Any]]:
    if issubclass(cls, BaseException | enum.Enum):
        return
    for name, member in vars(cls).items():
        if not name.startswith("_") and inspect.isfunction(member):
            yield name, member


def _shown(annotation: object) -> str:
    return str(annotation).replace("'", "")


if __name__ == "__main__":
    PAGE.write_text(page())

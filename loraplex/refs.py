"""Parses references to adapters, versions and splits. Pure text, no network.

ref    = [tenant "/"] name [":" (tag | "v" number) | "@sha256:" 64 hex]
tenant = [a-z0-9][a-z0-9._-]{0,95}
name   = [A-Za-z0-9][A-Za-z0-9._-]{0,95}, the same in upper and lower case
tag    = [a-z0-9_][a-z0-9._-]{0,63}, never v[0-9]+

A name is shown as it was first published. All comparisons use its lower-case form, which `Ref` and
`parse_name` return.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from loraplex.errors import InvalidRequest

DEFAULT_TENANT = "default"
LATEST = "latest"
MAX_NAME_CHARS = 96
MAX_TAG_CHARS = 64
MAX_BASE_ID_CHARS = 160
MAX_VERSION = 10**10 - 1
"""Version records are numbered with ten digits."""

_MAX_SHOWN = 8
"""Versions and tags that one error names."""

_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_TAG = re.compile(r"[a-z0-9_][a-z0-9._-]{0,63}")
_NUMBERED = re.compile(r"v[0-9]+")
_VERSION = re.compile(r"v([1-9][0-9]{0,9})")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Ref:
    """A parsed reference, its name in lower case. Exactly one of tag, version and digest is set."""

    tenant: str
    name: str
    tag: str | None = None
    version: int | None = None
    digest: str | None = None

    @property
    def adapter(self) -> str:
        """`tenant/name`, without the selector."""
        return f"{self.tenant}/{self.name}"

    def __str__(self) -> str:
        if self.digest is not None:
            return f"{self.adapter}@{self.digest}"
        return f"{self.adapter}:{self.tag if self.version is None else f'v{self.version}'}"


def parse_ref(text: str, default_tenant: str = DEFAULT_TENANT, *, field: str = "ref") -> Ref:
    """Parse a reference; without a selector it means the tag `latest`.

    Raises:
        InvalidRequest: with one violation on `field` that shows the corrected spelling.
    """
    path, at, digest = text.partition("@")
    if at:
        before, colon, selector = path.partition(":")
        if colon:
            fixed = f"{before}@{digest}"
            why = f"the digest already names a version; leave ':{selector}' out: try {fixed!r}"
            raise InvalidRequest.field(field, text, why)
        tenant, name = parse_name(path, default_tenant, field=field)
        return Ref(tenant, name, digest=check_digest(digest, field=field, before=f"{path}@"))
    path, colon, selector = text.partition(":")
    tenant, name = parse_name(path, default_tenant, field=field)
    if not colon:
        return Ref(tenant, name, tag=LATEST)
    if _NUMBERED.fullmatch(selector.lower()):
        version = parse_version(selector, field=field, before=f"{path}:")
        return Ref(tenant, name, version=version)
    return Ref(tenant, name, tag=check_tag(selector, field=field, before=f"{path}:"))


def parse_name(
    text: str, default_tenant: str = DEFAULT_TENANT, *, field: str = "name"
) -> tuple[str, str]:
    """Split `[tenant/]name` into (tenant, name in lower case). Raises InvalidRequest."""
    head, slash, tail = text.partition("/")
    tenant, name = (head, tail) if slash else (default_tenant, head)
    if _TENANT.fullmatch(tenant) and _NAME.fullmatch(name):
        return tenant, name.lower()
    check_bare(text, field)
    fixed = _corrected(name, MAX_NAME_CHARS, "/")
    if slash:
        fixed = f"{_corrected(tenant.lower(), MAX_NAME_CHARS, '/')}/{fixed}"
    raise InvalidRequest.field(
        field,
        text,
        "names are 1-96 letters, digits, '.', '_' or '-' and begin with a letter or digit, "
        f"optionally after a tenant in lower case and '/'; try {fixed!r}",
    )


def check_name(name: str, *, field: str = "name") -> str:
    """Return `name` as it is spelled if it is a legal adapter name without a '/'."""
    if _NAME.fullmatch(name):
        return name
    if "/" not in name:
        check_bare(name, field)
    raise InvalidRequest.field(
        field,
        name,
        "must be 1-96 letters, digits, '.', '_' or '-' and begin with a letter or digit; "
        f"try {_corrected(name, MAX_NAME_CHARS)!r}",
    )


def check_bare(text: str, field: str) -> None:
    """Raises InvalidRequest if a name is followed by the rest of a reference."""
    bare = re.split("[:@]", text, maxsplit=1)[0]
    tenant, slash, name = bare.rpartition("/")
    is_legal = _NAME.fullmatch(name) and (not slash or _TENANT.fullmatch(tenant))
    if bare != text and is_legal:
        why = f"takes a name without a tag, version or digest; try {bare!r}"
        raise InvalidRequest.field(field, text, why)


def check_tenant(tenant: str, *, field: str = "tenant") -> str:
    """Return `tenant` if it is a legal tenant."""
    if _TENANT.fullmatch(tenant):
        return tenant
    raise InvalidRequest.field(
        field,
        tenant,
        "must be 1-96 lower-case letters, digits, '.', '_' or '-' and begin with a letter or "
        f"digit; try {_corrected(tenant.lower(), MAX_NAME_CHARS)!r}",
    )


def check_tag(tag: str, *, field: str = "tag", before: str = "") -> str:
    """Return `tag` if it is a legal tag. `before`: what precedes it in the corrected spelling."""
    if _NUMBERED.fullmatch(tag.lower()):
        raise InvalidRequest.field(
            field, tag, f"v and a number always means a version; try '{before}{tag.lower()}-tag'"
        )
    if _TAG.fullmatch(tag):
        return tag
    fixed = _corrected(tag.lower(), MAX_TAG_CHARS) if tag else LATEST
    raise InvalidRequest.field(
        field,
        tag,
        "tags are 1-64 lower-case letters, digits, '_', '.' or '-' and do not begin with '.' or "
        "'-'; "
        f"try {before + fixed!r}",
    )


def check_base_id(base_id: str, *, field: str) -> str:
    """Return `base_id` if a base can be served under it."""
    is_visible = base_id.isascii() and base_id.isprintable() and " " not in base_id
    if is_visible and 0 < len(base_id) <= MAX_BASE_ID_CHARS and base_id[0] not in "-./":
        return base_id
    raise InvalidRequest.field(
        field,
        base_id,
        f"the id of a base must be 1-{MAX_BASE_ID_CHARS} visible ASCII characters and not begin "
        "with '-', '.' or '/'",
    )


def folder_name(path: str) -> str:
    """The last name of a path: that of a link, not of its target. `.` and `..` are resolved."""
    absolute = Path(path).absolute()
    return absolute.resolve().name if absolute.name == ".." else absolute.name


def parse_version(text: str, *, field: str = "version", before: str = "") -> int:
    """`v3` -> 3. `before` as in `check_tag`."""
    match = _VERSION.fullmatch(text)
    if match:
        return int(match[1])
    digits = text.lower().removeprefix("v").lstrip("0") if text.isascii() else ""
    fixed = digits if digits.isdigit() and len(digits) <= 10 else "1"
    raise InvalidRequest.field(
        field, text, f"versions are v1, v2, ... up to v{MAX_VERSION}; try '{before}v{fixed}'"
    )


def is_digest(text: str) -> bool:
    """Whether `text` is `sha256:` and 64 lower-case hex characters."""
    return _DIGEST.fullmatch(text) is not None


def check_digest(digest: str, *, field: str = "digest", before: str = "") -> str:
    """Return `digest` if it is `sha256:` and 64 lower-case hex characters. `before` as above."""
    if is_digest(digest):
        return digest
    fixed = digest.lower()
    hint = f"; try {before + fixed!r}" if is_digest(fixed) else ""
    raise InvalidRequest.field(
        field, digest, f"must be 'sha256:' and 64 lower-case hex characters{hint}"
    )


def why_missing(
    ref: Ref, versions: Collection[int], tags: Collection[str], names: Collection[str] = ()
) -> str:
    """Say which part of a reference does not exist, and which alternatives do.

    Args:
        ref: the reference, its name as the text is to show it.
        versions: those of the adapter that are not deleted; empty = there is no such adapter.
        tags: its tags.
        names: other adapters that the caller may see.
    """
    name = f"{ref.tenant}/{ref.name}"
    if not versions:
        others = {other.lower(): other for other in names}
        near = difflib.get_close_matches(name.lower(), others, n=1, cutoff=0.8)
        hint = f"did you mean {others[near[0]]}?" if near else "see `registry list` or /v1/models"
        return f"there is no adapter {name}; {hint}"
    numbers = ", ".join(f"v{number}" for number in sorted(versions)[-_MAX_SHOWN:])
    more = "..., " if len(versions) > _MAX_SHOWN else ""
    if ref.digest is not None:
        return f"no version of {name} has this digest (versions: {more}{numbers})"
    if ref.version is not None:
        return f"{name} has no version v{ref.version} (versions: {more}{numbers})"
    shown = ", ".join(sorted(tags)[:_MAX_SHOWN]) or "none"
    more_tags = ", ..." if len(tags) > _MAX_SHOWN else ""
    return f"{name} has no tag {ref.tag} (tags: {shown}{more_tags}; versions: {more}{numbers})"


class Weighted(Protocol):
    """One target of a split tag."""

    @property
    def weight(self) -> int: ...


W = TypeVar("W", bound=Weighted)


def split_choice(targets: Sequence[W], key: str) -> W:
    """The target of a split that `key` falls into, in proportion to the weights.

    The same key always gets the same target, and shifting weight between neighbours moves only the
    keys in the shifted share. An empty key means the first target.
    """
    if not targets:
        raise ValueError("split_choice needs at least one target")
    if not key or len(targets) == 1:
        return targets[0]
    point = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    total = sum(target.weight for target in targets)
    upto = 0
    for target in targets:
        upto += target.weight
        if point * total < upto << 64:
            return target
    return targets[-1]


def _corrected(text: str, max_chars: int, also: str = "") -> str:
    """The nearest legal spelling of `text`."""
    joined = re.sub(r"[^A-Za-z0-9._-]+", "-", text.strip())
    return joined.strip("-._" + also)[:max_chars].rstrip("-") or "my-adapter"

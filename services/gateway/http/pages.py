"""Query parameters of lists, and the page that answers them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from typing import Generic, Literal, TypedDict, TypeVar

from loraplex.errors import InvalidRequest
from loraplex_services.common.units import parse_digits

R = TypeVar("R")
T = TypeVar("T", bound=Mapping[str, object])


class Page(TypedDict, Generic[T]):
    object: Literal["list"]
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


def check_parameters(query: Mapping[str, str], known: Collection[str]) -> None:
    """Raises: InvalidRequest naming a parameter that is not among the known ones."""
    for name in query:
        if name.removesuffix("[]") not in known:
            why = f"this parameter is unknown or not served; there are {', '.join(known)}"
            raise InvalidRequest.field(name, "", why)


def is_newest_first(query: Mapping[str, str]) -> bool:
    """Whether the newest entries come first, which is the default. Raises: InvalidRequest."""
    if (value := query.get("order", "desc")) not in ("desc", "asc"):
        raise InvalidRequest.field("order", value, "must be desc or asc")
    return value == "desc"


def limit_of(query: Mapping[str, str], default: int, most: int) -> int:
    """The parameter `limit`. Raises: InvalidRequest."""
    text = query.get("limit")
    if text is None:
        return default
    number = parse_digits(text)
    if number is None or not 1 <= number <= most:
        raise InvalidRequest.field("limit", text[:32], f"must be an integer from 1 to {most}")
    return number


async def page_of(records: AsyncGenerator[R], entry_of: Callable[[R], T], limit: int) -> Page[T]:
    """The first records of a list as a page; no more are read than it needs."""
    entries: list[T] = []
    has_more = False
    async with aclosing(records):
        async for record in records:
            if has_more := len(entries) == limit:
                break
            entries.append(entry_of(record))
    return page_body(entries, has_more=has_more)


def page_body(entries: list[T], *, has_more: bool) -> Page[T]:
    """The object of one page of a list whose entries have an `id`."""
    return {
        "object": "list",
        "data": entries,
        "first_id": str(entries[0]["id"]) if entries else None,
        "last_id": str(entries[-1]["id"]) if entries else None,
        "has_more": has_more,
    }

"""Keeps responses in the gateway's memory, so that later requests can continue them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from loraplex.errors import InvalidRequest, NotFound
from loraplex_services.common.limits import (
    HTTP_BODY,
    MAX_HISTORY_RESPONSES,
    MAX_STORED_RESPONSE_BYTES,
    MAX_STORED_RESPONSE_BYTES_PER_TENANT,
)

_ENTRY_BYTES = 1024
"""Approximate size of an entry without its content."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response and the input that it answered, as JSON."""

    response_id: str
    previous_id: str
    """The response that it continued; may be empty."""
    response: bytes
    items: bytes
    """A list of the input items of this request alone."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return len(self.response) + len(self.items) + _ENTRY_BYTES


class ResponseStore:
    """Keeps what was used last, within limits of bytes. A tenant sees its own responses only.

    A tenant beyond its share loses its own oldest responses. Beyond the limit of all, the tenant
    that holds most loses its oldest.
    """

    def __init__(
        self,
        max_bytes: int = MAX_STORED_RESPONSE_BYTES,
        max_tenant_bytes: int = MAX_STORED_RESPONSE_BYTES_PER_TENANT,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._kept: dict[str, OrderedDict[str, StoredResponse]] = {}
        """Responses by tenant and id, least recently used first."""
        self._num_bytes: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Memory that all responses take."""
        return sum(self._num_bytes.values())

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """Keep a response, unless it alone exceeds the tenant's share."""
        if stored.num_bytes > self._max_tenant_bytes:
            return
        kept = self._kept.setdefault(tenant, OrderedDict())
        kept[stored.response_id] = stored
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + stored.num_bytes
        while self._num_bytes[tenant] > self._max_tenant_bytes:
            self._drop(tenant, next(iter(kept)))
        while self.num_bytes > self._max_bytes:
            largest = max(self._num_bytes, key=self._num_bytes.__getitem__)
            self._drop(largest, next(iter(self._kept[largest])))

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """A response. Raises: NotFound."""
        stored = self.find(tenant, response_id)
        if stored is None:
            raise not_kept("response_id", response_id, "RESPONSE_NOT_FOUND")
        return stored

    def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A response; None if it is not kept."""
        kept = self._kept.get(tenant)
        return None if kept is None else kept.get(response_id)

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget a response. Raises: NotFound."""
        self.get(tenant, response_id)
        self._drop(tenant, response_id)

    def history(self, tenant: str, response_id: str) -> list[StoredResponse]:
        """A response and all that it continued, oldest first; they become the last used.

        Raises: NotFound if one of them is gone; InvalidRequest if they are too long for a body.
        """
        found: list[StoredResponse] = []
        kept = self._kept.get(tenant, OrderedDict())
        next_id, num_bytes = response_id, 0
        while next_id:
            if next_id not in kept:
                raise not_kept("previous_response_id", next_id, "PREVIOUS_RESPONSE_NOT_FOUND")
            found.append(kept[next_id])
            next_id = found[-1].previous_id
            num_bytes += found[-1].num_bytes
            if len(found) > MAX_HISTORY_RESPONSES or num_bytes > HTTP_BODY.max_message_bytes:
                why = (
                    f"the conversation has more than {MAX_HISTORY_RESPONSES} responses or "
                    f"{HTTP_BODY.max_message_bytes} bytes; send what is needed of it as input"
                )
                raise InvalidRequest.field("previous_response_id", response_id, why)
        found.reverse()
        for each in found:
            kept.move_to_end(each.response_id)
        return found

    def _drop(self, tenant: str, response_id: str) -> None:
        self._num_bytes[tenant] -= self._kept[tenant].pop(response_id).num_bytes
        if not self._kept[tenant]:
            del self._kept[tenant], self._num_bytes[tenant]


def not_kept(field: str, response_id: str, reason: str) -> NotFound:
    """The error for a response that is not there."""
    why = (
        "this gateway keeps no response with this id: it was sent with store: false, deleted, "
        "evicted by newer ones, or made by another gateway or before a restart; send the "
        "conversation as input"
    )
    return NotFound.field(field, response_id, why, reason=reason)

"""OpenAI's files and the pages of its lists."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import msgspec

from ...api.errors import InvalidRequest
from ..protocol.sampling import check_range

T = TypeVar("T")

PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
MAX_FILE_BYTES = 512 * 2**20  # OpenAI's


class FileObject(msgspec.Struct):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None
    status: str = "processed"
    object: str = "file"


class FileDeleted(msgspec.Struct):
    id: str
    deleted: bool = True
    object: str = "file"


class Page(msgspec.Struct, Generic[T]):
    """Part of a list; ``after`` the last id of one comes the next."""

    data: list[T]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"

    @classmethod
    def of(cls, entries: list[Any], limit: int) -> Page[Any]:
        """``entries`` has one more than ``limit`` where there are more."""
        shown = entries[:limit]
        return cls(shown, len(entries) > limit, shown[0].id if shown else None, shown[-1].id if shown else None)


class PageQuery(msgspec.Struct, frozen=True):
    limit: int
    after: str | None
    order: Literal["asc", "desc"]
    purpose: str | None = None

    @classmethod
    def read(cls, query: Any, default_limit: int, most: int) -> PageQuery:
        """From a URL's query; raises InvalidRequest."""
        text = query.get("limit", str(default_limit))
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise InvalidRequest(f"limit must be a number, got {text[:80]!r}.", param="limit")
        check_range("limit", int(text), 1, most)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order must be 'asc' or 'desc', got {order[:80]!r}.", param="order")
        return cls(int(text), query.get("after"), order, query.get("purpose"))


def expiry_seconds(anchor: str | None, seconds: int | str | None, param: str) -> int | None:
    """The retention of a file in seconds, None for ever. Raises InvalidRequest."""
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(f"{param}.anchor must be 'created_at'.", param=f"{param}.anchor")
    if isinstance(seconds, str):
        seconds = int(seconds) if seconds.isascii() and seconds.isdigit() and len(seconds) < 10 else None
    if seconds is None:
        raise InvalidRequest(f"{param}.seconds must be a number.", param=f"{param}.seconds")
    check_range(f"{param}.seconds", seconds, 3600, 2_592_000)
    return seconds

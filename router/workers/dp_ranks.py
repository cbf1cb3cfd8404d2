"""Servers of several data-parallel ranks (``--dp-aware``): each rank is a worker, named ``url@rank``.

A rank has its own KV cache, so policies choose ranks and count load by rank. All ranks of a server share its address;
the request's body names the one that computes it, in SGLang's fields: ``data_parallel_rank``, and for a decode server
also ``disagg_prefill_dp_rank``, the rank that has the prompt's KV cache.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ...common.api.unreadable import UNREADABLE
from ..net.body import Body, LargeBody, with_members
from .registry import Worker

_RANK = re.compile(r"@[0-9]+/*$")
_OPENING = re.compile(rb"[ \t\r\n]*\{")
_ALIASES = {"data_parallel_rank": ("data_parallel_rank", "routed_dp_rank"),
            "disagg_prefill_dp_rank": ("disagg_prefill_dp_rank",)}
"""The names of each field: ``routed_dp_rank`` is SGLang's newer one, its servers of any version know the older."""
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

RANKED = frozenset((
    b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages", b"/generate", b"/invocations",
    b"/encode", b"/classify", b"/score", b"/rerank", b"/pooling", b"/v1/embeddings", b"/v1/rerank",
    b"/v1/score", b"/v1/classify"))
"""Paths whose requests a rank computes; all others are answered by the server as a whole."""


def server_url(url: str) -> str:
    """The URL of the server that ``url@rank`` belongs to; other URLs as they are."""
    return _RANK.sub("", url)


def count_of(info: dict[str, Any]) -> int:
    """The number of ranks in a ``/get_server_info`` response."""
    size = info.get("dp_size")
    return size if isinstance(size, int) and size > 1 else 1


def report_of(worker: Worker, report: Any) -> Any:
    """The entry of one rank in a server's ``/get_load`` response, a list with an entry a rank."""
    if worker.rank is None or not isinstance(report, list):
        return report
    return [entry for entry in report if isinstance(entry, dict) and entry.get("dp_rank") == worker.rank]


def with_rank(path: bytes, body: Body, rank: int) -> Body:
    """Adds the rank that is to compute a request to its body."""
    return _with_field(body, "data_parallel_rank", rank) if path in RANKED else body


def with_prefill_rank(body: Body, rank: int) -> Body:
    """Adds the rank of the prefill server that computes the prompt to the body for a decode server."""
    return _with_field(body, "disagg_prefill_dp_rank", rank)


def _with_field(body: Body, name: str, rank: int) -> Body:
    """Adds one field to a JSON object, all else byte for byte. A body that is no object stays as it is.

    The client's own value of the field is replaced: with two of them, the choice would be up to the server's parser.
    """
    client_body = body.whole if isinstance(body, LargeBody) else body
    if _OPENING.match(client_body) is None:
        return body
    if any(b'"%b"' % alias.encode() in client_body for alias in _ALIASES[name]):
        whole = b"".join(body.parts) if isinstance(body, LargeBody) else body
        try:
            fields = _decode_fields(whole)
        except UNREADABLE:
            return body
        if not fields.keys().isdisjoint(_ALIASES[name]):
            others = {field: value for field, value in fields.items() if field not in _ALIASES[name]}
            return msgspec.json.encode({name: rank, **others})
    return with_members(body, b'"%b":%d' % (name.encode(), rank))

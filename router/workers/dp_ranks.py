"""Servers of several data-parallel ranks (``--dp-aware``): each rank is a worker, named ``url@rank``.

A rank has a KV cache of its own, so it is what policies choose and what load is counted on. All ranks of a server share
its address; which of them computes a request is told to the server in the request's body, in SGLang's fields:
``data_parallel_rank``, and for a decode server also ``disagg_prefill_dp_rank``, the rank that holds the prompt's cache.
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
_SAME = {"data_parallel_rank": ("data_parallel_rank", "routed_dp_rank"),
         "disagg_prefill_dp_rank": ("disagg_prefill_dp_rank",)}
"""The names of one thing: ``routed_dp_rank`` is SGLang's newer one, its servers of any age know the older."""
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

RANKED = frozenset((
    b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages", b"/generate", b"/encode",
    b"/classify", b"/score", b"/rerank", b"/pooling", b"/v1/embeddings", b"/v1/rerank", b"/v1/score", b"/v1/classify"))
"""Paths whose requests a rank computes; to all others a server answers as a whole."""


def server_url(url: str) -> str:
    """The URL of the server that ``url@rank`` belongs to; other URLs as they are."""
    return _RANK.sub("", url)


def count_of(info: dict[str, Any]) -> int:
    """How many ranks a ``/get_server_info`` answer tells of."""
    size = info.get("dp_size")
    return size if isinstance(size, int) and size > 1 else 1


def report_of(worker: Worker, report: Any) -> Any:
    """What a server's ``/get_load`` answer, a list with an entry a rank, says about one of them."""
    if worker.rank is None or not isinstance(report, list):
        return report
    return [entry for entry in report if isinstance(entry, dict) and entry.get("dp_rank") == worker.rank]


def tell_rank(path: bytes, body: Body, rank: int) -> Body:
    """The body that makes a server compute a request on one of its ranks."""
    return _with_rank(body, "data_parallel_rank", rank) if path in RANKED else body


def tell_prefill_rank(body: Body, rank: int) -> Body:
    """The body that tells a decode server which rank of the prefill server computes the prompt."""
    return _with_rank(body, "disagg_prefill_dp_rank", rank)


def _with_rank(body: Body, name: str, rank: int) -> Body:
    """A JSON object with one field more, all else byte for byte. What is no object stays as it is.

    What a client says about the same thing is replaced: of two ranks the server's parser would choose.
    """
    own = body.whole if isinstance(body, LargeBody) else body
    if _OPENING.match(own) is None:
        return body
    if any(b'"%b"' % other.encode() in own for other in _SAME[name]):
        given = b"".join(body.parts) if isinstance(body, LargeBody) else body
        try:
            found = _decode_fields(given)
        except UNREADABLE:
            return body
        if not found.keys().isdisjoint(_SAME[name]):
            kept = {field: value for field, value in found.items() if field not in _SAME[name]}
            return msgspec.json.encode({name: rank, **kept})
    return with_members(body, b'"%b":%d' % (name.encode(), rank))

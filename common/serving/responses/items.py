"""Items of a response: its input as it is stored and listed, and output that becomes input again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b

import msgspec

from ...api.errors import InvalidRequest
from ..protocol.encoding import encode
from ..storage.file_schema import Page, PageQuery
from .schema import InputItem, InputPart

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_decode_items = msgspec.json.Decoder(list[InputItem]).decode
_decode_raw = msgspec.json.Decoder(list[msgspec.Raw]).decode


class _Output(msgspec.Struct):
    output: list[msgspec.Raw]


_decode_output = msgspec.json.Decoder(_Output).decode


class _Status(msgspec.Struct):
    status: str


_decode_status = msgspec.json.Decoder(_Status).decode


class _Identified(msgspec.Struct):
    id: str


def status_of(response: bytes) -> str:
    """The status of a stored response."""
    return _decode_status(response).status


def read_items(stored: bytes) -> list[InputItem]:
    """Items of their JSON array."""
    return _decode_items(stored)


def conversation(items: bytes, response: bytes) -> list[msgspec.Raw]:
    """The input items and the output items of a stored response, each encoded."""
    return [*_decode_raw(items), *_decode_output(response).output]


def complete(given: str | list[InputItem], response_id: str) -> list[InputItem]:
    """Input items with all that a list of them shows: their types, parts and ids. Ids are made of ``response_id``."""
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    return [_complete(item, f"{response_id}/in/{index}") for index, item in enumerate(given)]


def _complete(item: InputItem, name: str) -> InputItem:
    kind, content = item.type or "message", item.content
    if isinstance(content, str):
        content = [InputPart("output_text" if item.role == "assistant" else "input_text", content)]
    digest = blake2b(name.encode(), digest_size=16).hexdigest()
    return msgspec.structs.replace(item, type=kind, content=content, status=item.status or "completed",
                                   id=item.id or f"{_PREFIXES.get(kind, 'item')}_{digest}")


def as_input(output: Iterable[msgspec.Struct]) -> list[InputItem]:
    """Output items as the input of what comes next."""
    return _decode_items(encode(list(output)))


def page_of(stored: bytes, query: Mapping[str, str]) -> Page[msgspec.Raw]:
    """One page of stored input items; raises InvalidRequest."""
    asked = PageQuery.read(query, 20, 100)
    items = [(msgspec.json.decode(raw, type=_Identified).id, raw) for raw in _decode_raw(stored)]
    if asked.order == "desc":
        items.reverse()
    if asked.after is not None:
        ids = [name for name, _ in items]
        if asked.after not in ids:
            raise InvalidRequest(f"after names no input item of this response: {asked.after[:80]!r}.", param="after")
        items = items[ids.index(asked.after) + 1:]
    shown = items[:asked.limit]
    return Page([raw for _, raw in shown], len(items) > asked.limit, shown[0][0] if shown else None,
                shown[-1][0] if shown else None)

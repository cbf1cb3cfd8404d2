"""Decoding of JSON bodies to request structs, with errors that name the field."""

from __future__ import annotations

import re
from typing import Generic, TypeVar

import msgspec

from ...api.errors import InvalidRequest
from ...api.wire import unbounded_fields
from .unsupported_fields import Table, UnsupportedFields

T = TypeVar("T")
_AT = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?$", re.DOTALL)


class BodyDecoder(Generic[T]):
    """Decodes bodies of one request type. Fields that neither the type nor the table of refused ones has are ignored:
    clients send extras."""

    def __init__(self, kind: type[T], refused: Table | None = None):
        """Raises TypeError for a type with a number that has no bounds, which common/api/wire.py gives."""
        if unbounded := unbounded_fields(kind):
            raise TypeError(f"Give these numbers bounds: {', '.join(unbounded)}.")
        self._refused = UnsupportedFields(refused) if refused else None
        self._decoder = msgspec.json.Decoder(kind if self._refused is None else self._refused.added_to(kind))

    def decode(self, body: bytes) -> T:
        """Raises InvalidRequest for what is no JSON, no object, or has a field of the wrong type."""
        if not body.strip():
            raise InvalidRequest("The request body is empty; send a JSON object.")
        try:
            request: T = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _readable(error) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
        except RecursionError:
            raise InvalidRequest("The request body is nested too deeply.", code="invalid_json") from None
        if self._refused is not None:
            self._refused.check(request)
        return request


def required(value: str | None, path: str) -> str:
    """``value``; raises InvalidRequest where the field at ``path`` is missing."""
    if value is None:
        raise InvalidRequest(f"{path} is missing.", param=path)
    return value


def _readable(error: msgspec.ValidationError) -> InvalidRequest:
    match = _AT.match(str(error))
    assert match is not None
    what, path = match["what"].replace("`", ""), match["path"]
    what = what[:1].lower() + what[1:]
    if not path:
        return InvalidRequest(f"The request body: {what}.")
    return InvalidRequest(f"{path}: {what}.", param=path, code="invalid_type")

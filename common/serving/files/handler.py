"""``/v1/files``: upload, list, read and delete."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import BodyPartReader, http, web

from ...api.errors import InvalidRequest, NotFound
from ..context.serving_context import ServingContext
from ..storage.file_schema import PURPOSES, FileDeleted, Page, PageQuery, expiry_seconds
from ..storage.storage import Storage
from ..web import json_response

STORAGE: web.AppKey[Storage] = web.AppKey("storage", Storage)
_CHUNK_BYTES = 2**20
_MALFORMED = (ValueError, AssertionError, http.HttpProcessingError)  # aiohttp's, for a truncated or malformed form
_MAX_FIELD_BYTES = 1024
_FIELDS = frozenset(("purpose", "expires_after[anchor]", "expires_after[seconds]"))


def storage_of(request: web.Request) -> Storage:
    """The server's storage; raises NotFound where it has none."""
    storage = request.app.get(STORAGE)
    if storage is None:
        raise NotFound("This server stores no files; start it with --file-storage-path.", code="no_file_storage")
    return storage


async def upload(context: ServingContext, request: web.Request) -> web.Response:
    """Stores a file: a form with the fields ``purpose`` and ``file``."""
    store = storage_of(request).files
    if request.content_type != "multipart/form-data" or "boundary" not in request.headers.get("Content-Type", ""):
        raise InvalidRequest("Send the file as multipart/form-data, with the fields purpose and file.")
    fields: dict[str, str] = {}
    received: tuple[str, int] | None = None
    name = ""
    try:
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader):
                raise InvalidRequest("The form must not hold parts with parts of their own.")
            if part.name == "file" and received is None:
                name = (part.filename or "upload").encode("utf-8", "replace").decode()[:255]
                received = await store.receive(_chunks(part))
            elif part.name in _FIELDS:
                fields[part.name] = await _text(part)
            else:
                raise InvalidRequest(f"The form has a field {str(part.name)[:80]!r} that is not known or comes twice.",
                                     param=str(part.name)[:80])
        if received is None:
            raise InvalidRequest("The form lacks the field file.", param="file")
        purpose = fields.get("purpose")
        if purpose not in PURPOSES:
            raise InvalidRequest(f"purpose must be one of {', '.join(PURPOSES)}.", param="purpose")
        keep = expiry_seconds(fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]"),
                              "expires_after")
        entry = await store.add(received[0], name, purpose, received[1], keep)
    except BaseException as error:
        if received is not None:
            store.discard(received[0])
        if isinstance(error, _MALFORMED):
            raise InvalidRequest("The form is not valid multipart/form-data.") from None
        raise
    return json_response(entry)


async def _chunks(part: BodyPartReader) -> AsyncIterator[bytes]:
    while chunk := await part.read_chunk(_CHUNK_BYTES):
        yield bytes(chunk)


async def _text(part: BodyPartReader) -> str:
    """A short field; raises InvalidRequest for a long one."""
    text = b""
    async for chunk in _chunks(part):
        text += chunk
        if len(text) > _MAX_FIELD_BYTES:
            raise InvalidRequest(f"{part.name} is longer than {_MAX_FIELD_BYTES} bytes.", param=part.name)
    return text.decode("utf-8", "replace")


async def files(context: ServingContext, request: web.Request) -> web.Response:
    """A page of the stored files, newest first unless ``order`` is asc."""
    store = storage_of(request).files
    query = PageQuery.read(request.query, 10_000, 10_000)
    return json_response(Page.of(await store.page(query), query.limit))


async def file(context: ServingContext, request: web.Request) -> web.Response:
    """One file's entry."""
    return json_response(await storage_of(request).files.get(request.match_info["file_id"]))


async def content(context: ServingContext, request: web.Request) -> web.StreamResponse:
    """A file's content as it was uploaded."""
    store = storage_of(request).files
    entry = await store.get(request.match_info["file_id"])
    return web.FileResponse(store.path(entry.id), headers={"Content-Type": "application/octet-stream"})


async def delete(context: ServingContext, request: web.Request) -> web.Response:
    """Deletes a file; 409 while a batch reads it."""
    file_id = request.match_info["file_id"]
    await storage_of(request).files.delete(file_id)
    return json_response(FileDeleted(file_id))

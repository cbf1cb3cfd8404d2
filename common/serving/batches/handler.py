"""``/v1/batches``: create, list, read and cancel; and the storage that runs them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from aiohttp import web

from ..context.serving_context import ServingContext
from ..files.handler import STORAGE, storage_of
from ..storage.batch_schema import decode_create
from ..storage.file_schema import Page, PageQuery
from ..storage.storage import Storage
from ..web import json_response
from .job import Route
from .runner import BatchRunner

_RUNNER: web.AppKey[BatchRunner] = web.AppKey("batches", BatchRunner)
_ENDPOINTS: web.AppKey[frozenset[str]] = web.AppKey("batch_endpoints", frozenset)
ENDPOINTS = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"))
"""Endpoints whose requests a batch may hold, where the server has them."""


async def create(context: ServingContext, request: web.Request) -> web.Response:
    """Creates a batch that answers the requests of an uploaded file in the background."""
    storage = storage_of(request)
    body = decode_create(await request.read(), request.app[_ENDPOINTS])
    batch = await storage.batches.create(body)
    request.app[_RUNNER].wake()
    return json_response(batch)


async def batches(context: ServingContext, request: web.Request) -> web.Response:
    """A page of the batches, newest first."""
    storage = storage_of(request)
    query = PageQuery.read(request.query, 20, 100)
    return json_response(Page.of(await storage.batches.page(query), query.limit))


async def batch(context: ServingContext, request: web.Request) -> web.Response:
    """The state of a batch."""
    return json_response(await storage_of(request).batches.get(request.match_info["batch_id"]))


async def cancel(context: ServingContext, request: web.Request) -> web.Response:
    """Cancels a batch; answers so far stay."""
    return json_response(await storage_of(request).batches.cancel(request.match_info["batch_id"]))


def add_storage(app: web.Application, context: ServingContext, folder: str, routes: Mapping[str, Route],
                concurrency: int) -> None:
    """Opens a storage in ``folder`` for the application and runs its batches while it runs. Raises ConfigError."""
    storage = Storage(folder)
    app[STORAGE] = storage
    app[_ENDPOINTS] = frozenset(routes)
    app[_RUNNER] = runner = BatchRunner(context, storage, routes, concurrency)

    async def run(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(runner.run(), name="batches")
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        storage.close()

    app.cleanup_ctx.append(run)

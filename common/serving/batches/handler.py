"""``/v1/batches``"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from aiohttp import web

from ..context import ServingContext
from ..files.handler import STORAGE, storage_of
from ..files.schema import Page, PageQuery
from ..storage.storage import Storage
from ..web import json_response
from .job import Route
from .runner import BatchRunner
from .schema import decode_create

_RUNNER: web.AppKey[BatchRunner] = web.AppKey("batches", BatchRunner)
_ENDPOINTS: web.AppKey[frozenset[str]] = web.AppKey("batch_endpoints", frozenset)
ENDPOINTS = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"))
"""Whose requests a batch may hold, where the server has them."""


async def create(front: ServingContext, request: web.Request) -> web.Response:
    """Answer the requests of an uploaded file, in the background."""
    storage = storage_of(request)
    body = decode_create(await request.read(), request.app[_ENDPOINTS])
    batch = await storage.batches.create(body)
    request.app[_RUNNER].look()
    return json_response(batch)


async def batches(front: ServingContext, request: web.Request) -> web.Response:
    """A page of the batches, newest first."""
    storage = storage_of(request)
    query = PageQuery.read(request.query, 20, 100)
    return json_response(Page.of(await storage.batches.page(query), query.limit))


async def batch(front: ServingContext, request: web.Request) -> web.Response:
    """Where a batch stands."""
    return json_response(await storage_of(request).batches.get(request.match_info["batch_id"]))


async def cancel(front: ServingContext, request: web.Request) -> web.Response:
    """Stop a batch; what is answered stays."""
    return json_response(await storage_of(request).batches.cancel(request.match_info["batch_id"]))


def keep_files(app: web.Application, front: ServingContext, folder: str, routes: Mapping[str, Route],
               concurrency: int) -> None:
    """Give the application a storage in ``folder`` and run its batches while it runs. Raises ConfigError."""
    storage = Storage(folder)
    app[STORAGE] = storage
    app[_ENDPOINTS] = frozenset(routes)
    app[_RUNNER] = runner = BatchRunner(front, storage, routes, concurrency)

    async def run(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(runner.run(), name="batches")
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        storage.close()

    app.cleanup_ctx.append(run)

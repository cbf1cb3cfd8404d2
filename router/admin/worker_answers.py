"""One request to all workers, and the answer that combines theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..monitoring.cluster_view import ClusterView
from ..net.request import Request
from ..net.responses import Response, error_message
from ..workers.ask import WorkerResponse, ask
from ..workers.registry import Worker

Answers = dict[Worker, WorkerResponse]


def command(path: str, body: Mapping[str, Any] | bytes = b"") -> Request:
    """A POST of the router's own; ``body`` is JSON."""
    request = Request(b"POST", path.encode())
    request.path, request.request_id = path.encode(), b"router"
    request.headers = b"content-type: application/json\r\n"
    request.body = body if isinstance(body, bytes | bytearray) else msgspec.json.encode(body)
    return request


def servers(router: ClusterView) -> list[Worker]:
    """One worker of each server: a server is asked once, not each of its ranks."""
    return list({worker.endpoint.url: worker for worker in router.registry}.values())


async def ask_all(router: ClusterView, workers: Sequence[Worker], request: Request, seconds: float) -> Answers:
    """Sends a request to all workers at the same time."""
    answers = await asyncio.gather(*(ask(router.dispatcher, worker, request, seconds) for worker in workers))
    return dict(zip(workers, answers))


def combined(answers: Answers, *, succeeded: bool = True, message: str | None = None, **more: Any) -> Response:
    """Each worker's status (0: no answer) and error by its URL, and ``more``: 200 where all succeeded, 4xx where all
    that failed refused, else 502. It is no success where not ``succeeded``, whatever the workers answered."""
    by_url = {worker.endpoint.url: answer for worker, answer in answers.items()}
    failed = {url: answer for url, answer in by_url.items() if not answer.ok}
    refused = all(400 <= answer.status < 500 for answer in failed.values())
    success = succeeded and not failed
    result: dict[str, Any] = {"success": success}
    if message is not None:
        result["message"] = message
    result["workers"] = {url: answer.status for url, answer in by_url.items()}
    if failed:
        result["errors"] = {url: answer.detail or error_message(answer.body) for url, answer in failed.items()}
    status = 200 if success else 502 if not succeeded or not refused else max(
        answer.status for answer in failed.values())
    return Response.json(result | more, status)

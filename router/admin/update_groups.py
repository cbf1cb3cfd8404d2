"""Process groups of a trainer and the ranks of all workers, each of which the router gives its place."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from ...common.api.errors import Conflict, InvalidRequest, WorkerUnavailable
from ...common.api.unreadable import UNREADABLE
from ..monitoring.cluster_view import ClusterView
from ..net.request import Request
from ..net.responses import Response
from ..workers.ask import ask, get
from ..workers.registry import Worker
from .worker_answers import ask_all, combined, command, servers

_INFO_SECONDS = 10.0
_FOREVER = 24 * 3600.0


def init_group(router: ClusterView, request: Request) -> Coroutine[Any, Any, Response]:
    """Lets the ranks of all workers join a trainer's process group by one request: the first worker's are those from
    ``rank_offset`` on (1), the next one's follow. ``rank_offsets`` of the answer has each worker's. 400 where
    ``world_size`` is not their number and the trainer's."""
    return _init_group(router, request)


async def _init_group(router: ClusterView, request: Request) -> Response:
    body = _object(request.body)
    first, world_size = body.get("rank_offset", 1), body.get("world_size")
    workers = [worker for worker in servers(router) if worker.state == "healthy"]
    if not workers:
        raise Conflict("No worker takes requests: there is none to join the group.")
    if not isinstance(first, int) or not isinstance(world_size, int):
        return combined(await ask_all(router, workers, command(  # They say what is wrong.
            "/init_weights_update_group", request.body), _INFO_SECONDS))
    ranks = await _ranks(router, workers)
    if world_size != first + sum(ranks.values()):
        raise InvalidRequest(
            f"world_size must be {first + sum(ranks.values())}: {first} of the trainer, and "
            f"{' + '.join(map(str, ranks.values()))} ranks of the workers.", param="world_size")
    offsets, next_rank = {}, first
    for worker, count in ranks.items():
        offsets[worker], next_rank = next_rank, next_rank + count
    return await _join(router, body, offsets)


async def _join(router: ClusterView, body: dict[str, Any], offsets: dict[Worker, int]) -> Response:
    """Lets all workers join at the same time; where one cannot, those that did leave again."""
    seconds = router.config.http.request_timeout_secs or _FOREVER
    found = await asyncio.gather(*(
        ask(router.dispatcher, worker, command("/init_weights_update_group", {**body, "rank_offset": offset}), seconds)
        for worker, offset in offsets.items()))
    answers = dict(zip(offsets, found))
    failed = {worker: answer for worker, answer in answers.items() if not answer.ok}
    if failed:
        name = {"group_name": body["group_name"]} if "group_name" in body else {}
        await ask_all(router, [worker for worker in answers if worker not in failed],
                      command("/destroy_weights_update_group", name), _INFO_SECONDS)
    message = ("No worker is in the group: not all could join." if failed else
               f"{len(answers)} workers are in the group.")
    return combined(answers, message=message, rank_offsets={
        worker.endpoint.url: offset for worker, offset in offsets.items()})


async def _ranks(router: ClusterView, workers: list[Worker]) -> dict[Worker, int]:
    """The number of ranks of each server; raises WorkerUnavailable where one does not tell."""
    counts = {}
    for worker, answer in (await ask_all(router, workers, get("/get_server_info"), _INFO_SECONDS)).items():
        info = answer.json_object()
        sizes = [info.get("tp_size"), info.get("pp_size", 1)]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise WorkerUnavailable(f"{worker.endpoint.url} does not tell its tp_size.", retry_after=1.0)
        counts[worker] = int(sizes[0] or 1) * int(sizes[1] or 1)
    return counts


def _object(body: bytes) -> dict[str, Any]:
    """Raises InvalidRequest."""
    try:
        found = msgspec.json.decode(body)
    except UNREADABLE:
        found = None
    if not isinstance(found, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return found

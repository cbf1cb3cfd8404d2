"""``/switch_role``: changes the role of one worker's server, and sends it requests of its new role."""

from __future__ import annotations

import asyncio
from typing import Any

from ...common.api.errors import Conflict, InvalidRequest, NotFound
from ...common.config.roles import check_role
from ..config.endpoint import Endpoint
from ..monitoring.cluster_view import ClusterView
from ..net.responses import Response
from ..workers.ask import ask
from ..workers.dp_ranks import server_url
from ..workers.registry import Worker
from ..workers.roles import role_among
from .worker_answers import combined, command

_SECONDS = 30.0
_READY_SECONDS, _POLL_SECONDS = 10.0, 0.002
_NAMES = ("role", "new_role")
_URLS = ("url", "worker_url")


async def switch_role(router: ClusterView, parameters: dict[str, Any]) -> Response:
    """Changes the role of the server at ``url``, and answers once it takes requests in it.

    Nothing is drained: requests that run there end in the role that they began in. Refused where no worker of the
    server's role would be left, unless ``force`` is true.
    """
    role = check_role(str(_given(parameters, _NAMES)), "role")
    worker = _find(router, str(_given(parameters, _URLS)))
    target = role_among(role, worker.role)
    if target is None:
        raise InvalidRequest("This router sends whole requests to its workers; a prefill server needs a router with "
                             "--pd-disaggregation.", param="role")
    last = not any(other.role == worker.role and other.root is not worker.root and other.state == "healthy"
                   for other in router.registry)
    if last and target != worker.role and parameters.get("force") not in (True, "true", "1"):
        raise Conflict(f"{worker.endpoint.url} is the only healthy {worker.role} worker; add another one before, or "
                       "set force.")
    body = {"role": role}
    if "server_args" in parameters:
        body["server_args"] = parameters["server_args"]
    answer = await ask(router.dispatcher, worker, command("/switch_role", body), _SECONDS)
    if not answer.ok:
        return combined({worker: answer})
    url = worker.endpoint.url
    if worker in router.registry:  # else a health check has seen the new role meanwhile
        router.change_role(worker, target)
    joined = await _ready(router, url)
    return Response.json({"success": joined, "message": answer.json_object().get("message"),
                          "workers": [each.describe() for each in router.registry if each.endpoint.url == url]},
                         200 if joined else 502)


async def _ready(router: ClusterView, url: str) -> bool:
    """Waits until the server takes requests in its new role, in all processes of the router."""
    loop = router.dispatcher.loop
    deadline = loop.time() + _READY_SECONDS
    while loop.time() < deadline:
        workers = [worker for worker in router.registry if worker.endpoint.url == url]
        if workers and all(worker.state == "healthy" for worker in workers):
            await router.apply_changes()
            return True
        await asyncio.sleep(_POLL_SECONDS)
    return False


def _given(parameters: dict[str, Any], names: tuple[str, ...]) -> Any:
    value = next((parameters[name] for name in names if parameters.get(name) is not None), None)
    if value is None:
        raise InvalidRequest(f"{names[0]} is missing: url is a worker's, role is prefill, decode or null.",
                             param=names[0])
    return value


def _find(router: ClusterView, url: str) -> Worker:
    try:
        return router.registry.workers_at(Endpoint.parse(server_url(url)).url)[0]
    except ValueError as error:
        raise NotFound(str(error)) from None

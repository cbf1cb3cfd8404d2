"""Weights of a new server from one that runs: no file is read, and the new server has the identity of the other's.

Each rank joins a process group with the same rank of the other server; rank 0 asks that server for both, by HTTP.
"""

from __future__ import annotations

import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from ..api.errors import ConfigError
from ..config.server import ServerConfig
from ..distributed.tp import TPGroup
from ..distributed.update_group import join_update_group
from ..weights.instance_transfer import Manifest, check_sendable, receive_weights
from ..weights.slots import Slot

_JOIN_SECONDS = 60.0
_SEND_SECONDS = 1800.0


def load_from_instance(config: ServerConfig, slots: Iterable[Slot], world: TPGroup, device: torch.device) -> Manifest:
    """Fills the weights of this rank with those of the same rank of the server that the flags name. Raises ConfigError
    where they cannot be had."""
    args = config.model
    slots = list(slots)
    check_sendable(slots)
    ports = args.seed_ports
    if len(ports) != world.size:
        raise ConfigError(f"--remote-instance-weight-loader-send-weights-group-ports has {len(ports)} ports; give one "
                          f"for each of the server's {world.size} ranks.")
    host = args.remote_instance_weight_loader_seed_instance_ip
    assert host is not None
    name = world.broadcast_bytes(f"send_weights_{secrets.token_hex(6)}".encode() if world.rank == 0 else None).decode()
    backend = "nccl" if device.type == "cuda" else "gloo"
    common = {"master_address": host, "ports": ",".join(map(str, ports)), "group_name": name}
    pool = ThreadPoolExecutor(2, "remote-instance", lambda: _use(device))
    try:
        group = _both(pool, world, lambda: join_update_group(
            backend, host, ports[world.rank], 1, 2, name, device=device, timeout=_JOIN_SECONDS), lambda: _post(
            config, "/init_weights_send_group_for_remote_instance", _JOIN_SECONDS,
            {**common, "group_rank": 0, "world_size": 2, "backend": backend}))
        try:
            manifest: Manifest = _both(pool, world, lambda: receive_weights(group, slots), lambda: _post(
                config, "/send_weights_to_remote_instance", _SEND_SECONDS, common))
            return manifest
        finally:
            group.close()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _both(pool: ThreadPoolExecutor, world: TPGroup, work: Callable[[], Any], ask: Callable[[], None]) -> Any:
    """Returns the result of ``work``, for which the other server is asked meanwhile, by rank 0. Raises ConfigError."""
    done = pool.submit(work)
    running: list[Future[Any]] = [done, *([pool.submit(ask)] if world.rank == 0 else [])]
    wait(running, return_when=FIRST_EXCEPTION)
    for each in reversed(running):  # what the other server says explains more than a group that is not joined
        if each.done() and (error := each.exception()) is not None:
            if isinstance(error, ConfigError):
                raise error
            raise ConfigError(f"The weights cannot be had from the seed instance: {error}")
    return done.result()


def _post(config: ServerConfig, path: str, seconds: float, body: Mapping[str, Any]) -> None:
    """Raises ConfigError."""
    args, secret = config.model, config.http.admin_api_key or config.http.api_key
    host = args.remote_instance_weight_loader_seed_instance_ip or ""
    url = (f"{host if '://' in host else f'http://{host}'}:"
           f"{args.remote_instance_weight_loader_seed_instance_service_port}{path}")
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {secret}"} if secret else {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=seconds):
            return
    except urllib.error.HTTPError as error:
        try:
            message = json.loads(error.read())["message"]
        except (ValueError, KeyError, TypeError):
            message = f"status {error.code}"
        raise ConfigError(f"The seed instance {url} refuses: {message}") from None
    except OSError as error:
        raise ConfigError(f"The seed instance {url} does not answer: {error}.") from None



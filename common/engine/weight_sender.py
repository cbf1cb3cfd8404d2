"""Sends a rank's weights to the same rank of a new server, beside the steps."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from ..api.errors import ConfigError, Conflict, InvalidRequest
from ..distributed.tp import TPGroup
from ..distributed.update_group import UpdateGroup, join_update_group
from ..runner.model_runner import ModelRunner
from ..weights.instance_transfer import check_sendable, send_weights
from .background import BackgroundTasks


class WeightSender:
    """Sends on one rank. All ranks make the same calls in the same order, from their loops."""

    def __init__(self, world: TPGroup, runner: ModelRunner, timeout: float):
        """``timeout``: seconds to wait for the receiver."""
        self._world = world
        self._runner = runner
        self._timeout = timeout
        self._background = BackgroundTasks(world, runner.device, timeout)
        self._groups: dict[str, UpdateGroup] = {}

    def join(self, backend: str, address: str, ports: Sequence[int], name: str) -> Future[str]:
        """Waits at its port for the same rank of the new server. Raises InvalidRequest, Conflict."""
        if name in self._groups:
            raise Conflict(f"The group {name} exists; choose another group_name.", param="group_name")
        if len(ports) != self._world.size:
            raise InvalidRequest(f"ports has {len(ports)} entries: give one for each of the server's "
                                 f"{self._world.size} ranks.", param="ports")
        if (backend == "nccl") is not (self._runner.device.type == "cuda"):
            raise InvalidRequest(f"The backend {backend} does not go with the device {self._runner.device.type}: both "
                                 "servers must run on GPUs (nccl), or on CPUs (gloo).", param="backend")
        try:
            for destination in self._runner.destinations(draft=False):
                check_sendable(destination.slots())
        except ConfigError as error:
            raise InvalidRequest(str(error)) from None

        def task() -> str:
            self._groups[name] = join_update_group(backend, address, ports[self._world.rank], 0, 2, name,
                                                   device=self._runner.device, timeout=self._timeout)
            return f"The group {name} has its members."

        return self._background.start(task, undo=lambda: self._drop(name))

    def send(self, name: str, weight_version: str) -> Future[str]:
        """Sends all weights over a group, and leaves it. Raises InvalidRequest where there is none of this name."""
        if name not in self._groups:
            raise InvalidRequest(f"There is no group {name}: send /init_weights_send_group_for_remote_instance first.",
                                 param="group_name")
        destination = self._runner.destinations(draft=False)[0]
        identity = self._runner.model

        def task() -> str:
            count = send_weights(self._groups[name], list(destination.slots()), identity, weight_version)
            self._drop(name)
            return f"{count} bytes a rank are sent."

        return self._background.start(task, undo=lambda: self._drop(name))

    def _drop(self, name: str) -> None:
        if (group := self._groups.pop(name, None)) is not None:
            group.close()

    def close(self) -> None:
        """Leaves all groups."""
        for name in list(self._groups):
            self._drop(name)

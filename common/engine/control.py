"""Executes administrative commands on a rank (see ``common/commands``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec

from ..api.errors import Conflict, InvalidRequest, ServingError, WorkerUnavailable
from ..api.identity import ModelIdentity
from ..api.messages import Done
from ..commands.base import Command
from ..commands.memory import MemoryKind
from ..commands.registry import COMMANDS, name_of
from ..config.server import ServerConfig
from ..distributed.tp import TPGroup
from ..runner.model_runner import ModelRunner
from ..scheduler.batcher import Batcher
from ..scheduler.request_tracker import RequestTracker
from ..weights.custom_loaders import custom_loaders
from .peers import NoPeers, Peers
from .profiler import Profiler
from .weight_receiver import WeightReceiver
from .weight_sender import WeightSender

if TYPE_CHECKING:
    from .switchable_scheduler import SwitchableScheduler


class Control:
    """Control of one rank. All ranks of the engine agree on the outcome before any of them changes shared state."""

    def __init__(self, config: ServerConfig, tp: TPGroup, runner: ModelRunner, batcher: Batcher,
                 peers: Peers | None = None, tracker: RequestTracker | None = None,
                 roles: SwitchableScheduler | None = None):
        """``tracker``: the requests, whose pages change their namespaces with the weights. ``roles``: where the
        server's role may change."""
        self.config = config
        self.tp = tp
        self.runner = runner
        self.batcher = batcher
        self._tracker = tracker
        self.peers = peers or NoPeers()
        self.roles = roles
        self.released: set[MemoryKind] = set()
        self.step_delay = 0.0
        self.profiler = Profiler(tp.rank, runner.device, runner)
        self.weights = WeightReceiver(tp, runner, config.parallel.dist_timeout, custom_loaders(config.model))
        self.weight_sender = WeightSender(tp, runner, config.parallel.dist_timeout)
        self._unfinished: list[tuple[int, Future[str]]] = []

    @property
    def gauges(self) -> Mapping[str, float]:
        """Those of the model runner."""
        return self.runner.expert_gauges

    @property
    def model(self) -> ModelIdentity:
        """The model whose weights the engine computes with."""
        return self.runner.model

    def check_serving(self) -> None:
        """Raises WorkerUnavailable while memory that requests need is released."""
        if self.released:
            raise WorkerUnavailable(f"The memory of {' and '.join(sorted(self.released))} is released; call "
                                    "/resume_memory_occupation first.")

    def forget_pages(self) -> None:
        """Lets no page that was computed with other weights than those of now be read by a request that has none."""
        model = self.runner.model
        weights = f"{model.updates} {model.fingerprint}"  # two servers that were updated once may have other weights
        self.batcher.cache.change_weights(weights)
        if self._tracker is not None:
            self._tracker.change_weights(weights)

    def command(self, name: str) -> Command[msgspec.Struct]:
        """The command of a name; raises InvalidRequest on all ranks where one of them does not know it."""
        if not self.tp.all_true(name in COMMANDS):
            raise InvalidRequest(f"A rank of the engine has no command {name}: install the package that registers it "
                                 "where that rank runs.")
        return COMMANDS.get(name)

    def execute(self, command: msgspec.Struct, *, idle: bool, still: bool = False) -> str | Future[str]:
        """Execute a command; returns a sentence about what was done, or will be, beside the steps. Raises ServingError,
        with nothing changed, where it is refused.

        ``idle``: no request runs or has pages. ``still``: the requests that have are paused, and none is transferred.
        """
        spec = COMMANDS.get(name_of(command))
        # Data-parallel ranks have requests of their own.
        allowed = self.tp.all_true(idle or (still and spec.while_paused))
        if not allowed and not spec.while_busy:
            raise Conflict("Not while requests run; wait for them, abort them, or pause them with the mode " + (
                           "retract or in_place." if spec.while_paused else "retract."))
        return spec.run(self, command)

    def finish_later(self, seq: int, result: Future[str]) -> None:
        """Keeps the result of a command until ``finished`` returns it."""
        self._unfinished.append((seq, result))

    @property
    def busy(self) -> bool:
        """True while ``finished`` will return more."""
        return bool(self._unfinished)

    def finished(self) -> Iterator[Done]:
        """Yields the results of commands that have ended since the last call."""
        ended = [each for each in self._unfinished if each[1].done()]
        for each in ended:
            self._unfinished.remove(each)
            try:
                yield Done(each[0], each[1].result())
            except ServingError as error:
                yield Done(each[0], error.message, error.wire_code)

    def close(self) -> None:
        """Leaves what was joined at run time."""
        self.weights.close()
        self.weight_sender.close()

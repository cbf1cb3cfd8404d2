"""Executes administrative commands on a rank (see ``common/commands``)."""

from __future__ import annotations

import msgspec

from ..api.errors import Conflict, InvalidRequest, WorkerUnavailable
from ..api.identity import ModelIdentity
from ..commands.base import Command
from ..commands.memory import MemoryKind
from ..commands.registry import COMMANDS, name_of
from ..config.server import ServerConfig
from ..distributed.tp import TPGroup
from ..runner.model_runner import ModelRunner
from ..scheduler.batcher import Batcher
from .peers import NoPeers, Peers
from .profiler import Profiler


class Control:
    """Control of one rank. All ranks of the engine agree on the outcome before any of them changes shared state."""

    def __init__(self, config: ServerConfig, tp: TPGroup, runner: ModelRunner, batcher: Batcher,
                 peers: Peers | None = None):
        self.config = config
        self.tp = tp
        self.runner = runner
        self.batcher = batcher
        self.peers = peers or NoPeers()
        self.released: set[MemoryKind] = set()
        self.step_delay = 0.0
        self.profiler = Profiler(tp.rank, runner.device, runner)

    @property
    def model(self) -> ModelIdentity:
        """The model whose weights the engine computes with."""
        return self.runner.model

    def check_serving(self) -> None:
        """Raises WorkerUnavailable while memory that requests need is released."""
        if self.released:
            raise WorkerUnavailable(f"The memory of {' and '.join(sorted(self.released))} is released; call "
                                    "/resume_memory_occupation first.")

    def command(self, name: str) -> Command[msgspec.Struct]:
        """The command of a name; raises InvalidRequest on all ranks where one of them does not know it."""
        if not self.tp.all_true(name in COMMANDS):
            raise InvalidRequest(f"A rank of the engine has no command {name}: install the package that registers it "
                                 "where that rank runs.")
        return COMMANDS.get(name)

    def execute(self, command: msgspec.Struct, *, idle: bool) -> str:
        """Execute a command; returns a sentence about what was done. Raises ServingError, with nothing changed, where
        it is refused.

        ``idle``: no request runs or has pages.
        """
        spec = COMMANDS.get(name_of(command))
        idle = self.tp.all_true(idle)  # data-parallel ranks have requests of their own
        if not idle and not spec.while_busy:
            raise Conflict("Not while requests run; wait for them, abort them, or pause them with the mode retract.")
        return spec.run(self, command)

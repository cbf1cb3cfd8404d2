"""Executes the commands that change an engine as a whole (see ``api.commands``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..api.commands import (
    Command,
    ContinueGeneration,
    FlushCache,
    MemoryKind,
    PauseGeneration,
    PauseMode,
    RecordExperts,
    ReleaseMemory,
    ResumeMemory,
    SetLimits,
    StartProfile,
    StopProfile,
    UpdateWeights,
)
from ..api.errors import ConfigError, Conflict, InvalidRequest, ServingError, WorkerUnavailable
from ..api.identity import ModelIdentity
from ..config.server import ServerConfig
from ..config.server.schedule import SCHEDULE_POLICIES
from ..distributed.tp import TPGroup
from ..runner.model_runner import ModelRunner
from ..scheduler.batcher import Batcher
from .peers import NoPeers, Peers
from .profiler import Profiler

_ALLOWED_WHILE_BUSY = (StartProfile, StopProfile, SetLimits, RecordExperts, PauseGeneration, ContinueGeneration)


class Control:
    """Control of one rank. All ranks of the engine agree on the outcome before any of them changes shared state."""

    def __init__(self, config: ServerConfig, tp: TPGroup, runner: ModelRunner, batcher: Batcher,
                 peers: Peers | None = None):
        self._config = config
        self._tp = tp
        self._runner = runner
        self._batcher = batcher
        self._peers = peers or NoPeers()
        self._released: set[MemoryKind] = set()
        self.profiler = Profiler(tp.rank, runner.device)

    @property
    def model(self) -> ModelIdentity:
        """The model whose weights the engine computes with."""
        return self._runner.model

    def check_serving(self) -> None:
        """Raises WorkerUnavailable while memory that requests need is released."""
        if self._released:
            raise WorkerUnavailable(f"The memory of {' and '.join(sorted(self._released))} is released; call "
                                    "/resume_memory_occupation first.")

    def execute(self, command: Command, *, idle: bool) -> str:
        """Execute a command; returns a sentence about what was done. Raises ServingError, with nothing changed, where
        it is refused.

        ``idle``: no request runs or has pages.
        """
        idle = self._tp.all_true(idle)  # data-parallel ranks have requests of their own
        if not idle and not isinstance(command, _ALLOWED_WHILE_BUSY):
            raise Conflict("Not while requests run; wait for them, abort them, or pause them with the mode retract.")
        match command:
            case FlushCache():
                self._batcher.cache.flush()
                return "The prefix cache is empty."
            case UpdateWeights():
                return self._update_weights(command)
            case ReleaseMemory(kinds):
                return self._release(kinds)
            case ResumeMemory(kinds):
                return self._resume(kinds)
            case StartProfile():
                return self.profiler.start(command)
            case StopProfile():
                return self.profiler.stop()
            case SetLimits():
                return self._set_limits(command)
            case RecordExperts():
                return self._record_experts(command)
            case PauseGeneration(mode):
                return self._pause(mode)
            case ContinueGeneration():
                self.check_serving()
                self._batcher.paused = None
                return "Generation continues."

    def _update_weights(self, command: UpdateWeights) -> str:
        if "weights" in self._released:
            self._resume(("weights",))
        self._check_on_all_ranks(lambda: self._runner.check_weights(command.model_path, command.revision))
        # Sessions end before the first weight is changed and begin anew after the last: no KV cache that was computed
        # with the previous weights, or that a peer has computed with others, is ever mistaken for one of the new ones.
        self._peers.leave()
        self._runner.update_weights(command.model_path, command.revision)
        self._batcher.cache.flush()
        self._tp.barrier()
        self._peers.join(self._runner.model)
        self._tp.barrier()  # a command after the reply finds all ranks updated
        return f"The weights are those of {command.model_path}."

    def _release(self, kinds: tuple[MemoryKind, ...]) -> str:
        if "kv_cache" in kinds and self._config.mode != "null":
            # Peers know the addresses of this pool, and a transfer library has registered it.
            raise InvalidRequest("The KV pool of a prefill or decode server stays where peers know it; release "
                                 'only tags ["weights"].', param="tags")
        new = set(kinds) - self._released
        if "kv_cache" in new:
            self._batcher.cache.flush()
        self._runner.release(new)
        self._released |= new
        return _sentence("released", new)

    def _resume(self, kinds: tuple[MemoryKind, ...]) -> str:
        due = set(kinds) & self._released
        self._runner.resume(due, complete=due == self._released)
        self._released -= due
        return _sentence("resumed", due)

    def _pause(self, mode: PauseMode) -> str:
        if mode == "retract" and (self._config.mode == "prefill" or self._config.model.is_embedding):
            mode = "in_place"  # computed pages are being sent to decode, or are part of a mean
        self._batcher.pause(mode)
        return "Generation is paused."

    def _set_limits(self, command: SetLimits) -> str:
        started = self._config.schedule
        given = {name: value for name in command.__struct_fields__ if (value := getattr(command, name)) is not None}
        limits = {"max_running_requests": started.max_running_requests,
                  "chunked_prefill_size": started.chunked_prefill_size}
        if started.chunked_prefill_size < 0:
            limits["chunked_prefill_size"] = started.max_prefill_tokens
        for name, limit in limits.items():
            if name in given and not 1 <= given[name] <= limit:
                raise InvalidRequest(f"{name} must be between 1 and {limit}, which the server started with, not "
                                     f"{given[name]}.", param=name)
        if given.get("schedule_policy", "fcfs") not in SCHEDULE_POLICIES:
            raise InvalidRequest(f"schedule_policy must be one of {', '.join(SCHEDULE_POLICIES)}.",
                                 param="schedule_policy")
        self._batcher.set_args(dataclasses.replace(self._batcher.args, **given))
        return "Set " + ", ".join(f"{name} to {value}" for name, value in given.items()) + "."

    def _record_experts(self, command: RecordExperts) -> str:
        record = self._runner.expert_record
        match command.action:
            case "start":
                return record.start()
            case "stop":
                return record.stop()
            case "dump":
                return record.dump(command.folder, write=self._tp.rank == 0)

    def _check_on_all_ranks(self, check: Callable[[], None]) -> None:
        """Run ``check`` on all ranks of the group; raises InvalidRequest on all of them where it failed on one."""
        reason = None
        try:
            check()
        except (ConfigError, ServingError) as error:
            reason = str(error)
        if not self._tp.all_true(reason is None):
            raise InvalidRequest(reason or "Another rank cannot do it.", param="model_path")


def _sentence(verb: str, kinds: set[MemoryKind]) -> str:
    return f"{' and '.join(sorted(kinds)) or 'nothing'} {verb}."

"""Messages between the main process and its workers: msgpack structs, each with its name as tag."""

from __future__ import annotations

import msgspec

from ...api.errors import ServingError, from_code
from ...api.grammar import GrammarSpec
from ...api.messages import Abort, Generate, Loading, OutputBatch, Ready
from ...obs.counts import Counts


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """A ServingError on its way to another process."""

    code: str
    message: str
    param: str | None
    retry_after: float | None

    @classmethod
    def of(cls, error: ServingError) -> WireError:
        return cls(error.wire_code, error.message, error.param, error.retry_after)

    def rebuild(self) -> ServingError:
        error = from_code(self.code, self.message)
        error.param, error.retry_after = self.param, self.retry_after
        return error


# ---------------------------------------------------------------------- to a worker

class ServerState(msgspec.Struct, tag=True):
    """The state of the main process that requests depend on, as a whole. Answered by ``StateApplied``."""

    version: int
    loading: Loading
    ready: Ready | None
    dead: str | None
    weights_path: str
    weight_version: str
    log_level: int | None
    log_text: bool
    dump_folder: str | None
    num_freezes: int


class RequestFailed(msgspec.Struct, tag=True):
    """A request of this worker ended with an error."""

    rid: str
    error: WireError


class GrammarReady(msgspec.Struct, tag=True):
    """Requests with a grammar may be sent, or must be refused with ``error``."""

    seq: int
    error: WireError | None


class AbortGroup(msgspec.Struct, tag=True):
    """Abort a request with all its choices; for an empty id those that were not sent yet: all others are aborted."""

    rid: str


class CollectCounts(msgspec.Struct, tag=True):
    """Answered by ``WorkerCounts``."""

    seq: int


class Drain(msgspec.Struct, tag=True):
    """Accept no more connections, answer what was received, then end."""


class Cut(msgspec.Struct, tag=True):
    """End the requests that remain with an error."""


ToWorker = (ServerState | OutputBatch | RequestFailed | GrammarReady | AbortGroup | CollectCounts | Drain | Cut)


# ---------------------------------------------------------------------- to the main process

class Listening(msgspec.Struct, tag=True):
    """The worker accepts connections, and serves requests as soon as the engine is ready."""


class StartFailed(msgspec.Struct, tag=True):
    """The worker cannot start; ``message`` is one sentence for the operator."""

    message: str


class StateApplied(msgspec.Struct, tag=True):
    version: int


class PrepareGrammar(msgspec.Struct, tag=True):
    """Prepare a grammar for ``client``. Answered by ``GrammarReady``."""

    seq: int
    spec: GrammarSpec
    param: str | None
    client: str


class WorkerCounts(msgspec.Struct, tag=True):
    """The worker's counters and histograms, and the requests that it answered with a failure, since it started."""

    seq: int
    counts: Counts
    num_failures: int


ToMain = Generate | Abort | Listening | StartFailed | StateApplied | PrepareGrammar | WorkerCounts

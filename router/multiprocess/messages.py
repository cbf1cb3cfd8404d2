"""Messages between the parent and its children: msgpack structs, each with its name as tag."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from ..config import RouterConfig
from ..relay.poison_guard import Deaths
from ..workers.circuit import CircuitState
from ..workers.compatibility import Misfit
from ..workers.registry import Role, State, WorkerMetadata


class WorkerUpdate(msgspec.Struct, frozen=True):
    """One worker, as the parent knows it. ``root`` is the id of the first rank of the worker's server."""

    id: int
    row: int
    server: str
    rank: int | None
    root: int
    api_key: str | None
    role: Role
    bootstrap_port: int | None
    model_ids: tuple[str, ...]
    model_cards: tuple[dict[str, Any], ...]
    checked: bool
    always_healthy: bool
    named: bool
    metadata: WorkerMetadata
    state: State
    hung: bool
    draining: bool
    is_baton: bool
    keeps_files: bool
    switches: bool
    serves_whole: bool
    response_tag: str | None
    pair_key: str | None
    model_fingerprint: str | None
    fitting: frozenset[str] | None
    misfits: tuple[Misfit, ...]
    stage: str
    weight_version: str | None
    outdated: str
    hold: str
    circuit: CircuitState
    troubled: bool
    probing: bool

    worker_fields: ClassVar[tuple[str, ...]] = (
        "role", "bootstrap_port", "model_ids", "model_cards", "state", "hung", "draining", "is_baton", "keeps_files",
        "switches", "serves_whole", "response_tag", "checked", "always_healthy", "named", "metadata", "pair_key",
        "model_fingerprint", "fitting", "misfits", "stage", "weight_version", "outdated", "hold")
    """Fields that are attributes of a worker and may change."""


# ---------------------------------------------------------------------- to a child


class WorkerUpdates(msgspec.Struct, tag=True, frozen=True):
    """Workers that joined or changed, and ids of workers that left; requests on those in ``cut`` are cut."""

    version: int
    changed: tuple[WorkerUpdate, ...]
    removed: tuple[int, ...] = ()
    cut: tuple[int, ...] = ()


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first message: the child's number, and all that it runs with. ``stats_file`` is the descriptor of the shared
    memory, ``signals`` are the children's event descriptors."""

    config: RouterConfig
    child: int
    count: int
    stats_file: int
    signals: tuple[int, ...]
    workers: WorkerUpdates
    deaths: tuple[Deaths, ...] = ()


class AdminResponse(msgspec.Struct, tag=True, frozen=True):
    """The parent's response to request ``number`` of the child."""

    number: int
    status: int
    body: bytes
    content_type: str
    headers: tuple[tuple[str, str], ...]


class CollectCounters(msgspec.Struct, tag=True, frozen=True):
    """AdminRequest for the child's counters."""

    number: int


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Accept no more, let the running requests end, and exit."""


# ---------------------------------------------------------------------- to the parent


class Listening(msgspec.Struct, tag=True, frozen=True):
    """The child accepts connections."""


class StartupFailed(msgspec.Struct, tag=True, frozen=True):
    """The child cannot start: a sentence for the user."""

    sentence: str


class UpdatesApplied(msgspec.Struct, tag=True, frozen=True):
    """The child has applied all updates up to a version."""

    version: int


class AdminRequest(msgspec.Struct, tag=True, frozen=True):
    """A client's request to the router itself, which the parent answers."""

    number: int
    method: bytes
    path: bytes
    query: bytes
    body: bytes


class Counters(msgspec.Struct, tag=True, frozen=True):
    """The child's counters (``counters.dump``), and tokens in followed workers' prefix caches by worker id."""

    number: int
    counts: bytes
    cached_tokens: dict[int, int]


class WorkerSuspected(msgspec.Struct, tag=True, frozen=True):
    """A request failed on a worker below HTTP."""

    worker: int
    reason: str
    detail: str
    refused: bool


class RequestFailed(msgspec.Struct, tag=True, frozen=True):
    """A worker failed a request."""

    worker: int


class RequestServed(msgspec.Struct, tag=True, frozen=True):
    """A worker that had failed requests answered one."""

    worker: int


class ProbeChanged(msgspec.Struct, tag=True, frozen=True):
    """The probe of a half-open circuit begins, or ended."""

    worker: int
    runs: bool


ToChild = Start | WorkerUpdates | AdminResponse | CollectCounters | Shutdown | Deaths
ToParent = (Listening | StartupFailed | UpdatesApplied | AdminRequest | Counters | WorkerSuspected | RequestFailed
            | RequestServed | ProbeChanged | Deaths)

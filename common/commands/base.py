"""The parts of an administrative command, and what its functions may use of a rank and of a server.

A command's file is read by the router too: at its top level it imports nothing that needs torch.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

if TYPE_CHECKING:
    from ..config.server import ServerConfig
    from ..distributed.tp import TPGroup
    from ..engine.peers import Peers
    from ..engine.profiler import Profiler
    from ..engine.switchable_scheduler import SwitchableScheduler
    from ..engine.weight_receiver import WeightReceiver
    from ..engine.weight_sender import WeightSender
    from ..runner.model_runner import ModelRunner
    from ..scheduler.batcher import Batcher
    from ..serving.context.serving_context import ServingContext
    from .memory import MemoryKind

S = TypeVar("S", bound=msgspec.Struct)

GET_OR_POST = ("GET", "POST")

LOAD_SECONDS = 1800.0
"""The timeout of a command that moves weights or writes large files."""


class Rank(Protocol):
    """A rank of the engine, as a command's ``run`` changes it. All ranks run the same commands in the same iteration of
    their loops."""

    config: ServerConfig
    tp: TPGroup
    runner: ModelRunner
    batcher: Batcher
    peers: Peers
    roles: SwitchableScheduler | None
    """The scheduler of a server whose role may change."""
    profiler: Profiler
    weights: WeightReceiver
    weight_sender: WeightSender
    released: set[MemoryKind]
    """The kinds of memory that are released."""
    step_delay: float
    """Seconds of sleep after every step."""

    def check_serving(self) -> None:
        """Raises WorkerUnavailable while memory that requests need is released."""

    def forget_pages(self) -> None:
        """Lets no page that was computed with other weights than those of now be read by a request that has none."""


class Server(Protocol):
    """The API server, as an endpoint's ``serve`` uses it."""

    @property
    def context(self) -> ServingContext: ...

    async def execute(self, command: msgspec.Struct) -> str:
        """Runs a command on all ranks; returns rank 0's sentence. Raises the ServingError with which the engine
        refused, and WorkerUnavailable while the server takes no requests."""


@dataclass(frozen=True)
class Broadcast:
    """Sending of an endpoint's request to all workers by the router, and the combination of their answers.

    ``slow``: it may take minutes. ``renames``: workers may serve other models afterwards. ``combine`` makes further
    fields of the router's answer from the answers of the workers that succeeded, JSON objects by URL; without it the
    answer has each worker's status alone.
    """

    slow: bool = False
    renames: bool = False
    combine: Callable[[Mapping[str, Mapping[str, Any]]], Mapping[str, Any]] | None = None


def messages_by_worker(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Combines workers' answers: each one's sentence by its URL."""
    return {"messages": {url: answer.get("message") for url, answer in answers.items()}}


@dataclass(frozen=True)
class Endpoint:
    """An HTTP endpoint that gives a command, which is also a method of ``baton.Engine``.

    The method is called as the last part of ``path``, or ``method_name``; its parameters are the fields of ``body``.
    The docstring of ``serve`` describes both. Endpoints of one path have other ``methods``, names of their own and the
    same ``broadcast``.
    """

    path: str
    serve: Callable[[Server, Any], Awaitable[str]]
    """Gets the decoded body (None without ``body``); returns the sentence that becomes the answer's ``message``; with
    ``returns_json`` the whole answer."""
    body: type[msgspec.Struct] | None = None
    """JSON body; an empty one means defaults."""
    methods: tuple[str, ...] = ("POST",)
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fixed fields of the answer besides ``success`` and ``message``."""
    returns_json: bool = False
    """True where ``serve`` returns JSON, which is the answer."""
    for_clients: bool = False
    """True where a client's key opens it; else it takes an administrator's."""
    broadcast: Broadcast | None = Broadcast()
    """None: the router has no such endpoint."""
    method_name: str = ""

    @property
    def name(self) -> str:
        return self.method_name or self.path.rpartition("/")[2]

    @property
    def parameters(self) -> tuple[msgspec.structs.FieldInfo, ...]:
        return () if self.body is None else msgspec.structs.fields(self.body)

    @property
    def requires_body(self) -> bool:
        """True where a field of the body has no default."""
        return any(each.required for each in self.parameters)


@dataclass(frozen=True)
class Command(Generic[S]):
    """An administrative command."""

    struct: type[S]
    """The message that ranks get."""
    run: Callable[[Rank, S], str | Future[str]]
    """Executes it on a rank; returns a sentence about what was done, or will be, beside the steps. Raises ServingError,
    with nothing changed, where it is refused."""
    endpoints: tuple[Endpoint, ...]
    while_busy: bool = False
    """True where it is allowed while requests run; else they are answered with Conflict."""
    while_paused: bool = False
    """True where it is allowed while requests that have pages are paused, and none is being transferred."""
    synchronizes: bool = False
    """True where the step in flight must end before it."""
    timeout: float = 60.0
    """Seconds to wait for the ranks' answers."""

    @functools.cached_property
    def decode(self) -> Callable[[bytes | msgspec.Raw], S]:
        """Decodes what a rank got; raises msgspec.ValidationError."""
        return msgspec.msgpack.Decoder(self.struct).decode


def plain_endpoint(path: str, struct: type[S], **facts: Any) -> Endpoint:
    """An endpoint whose body is the command itself; the struct's docstring describes it."""
    async def serve(server: Server, body: S | None) -> str:
        return await server.execute(struct() if body is None else body)

    serve.__doc__, serve.__name__ = struct.__doc__, path.rpartition("/")[2]
    return Endpoint(path, serve, struct if struct.__struct_fields__ else None, **facts)

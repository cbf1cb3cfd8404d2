"""The stage of a server's life."""

from __future__ import annotations

import asyncio
import uuid
import zlib
from contextvars import ContextVar

from ...api.errors import EngineDead, WorkerUnavailable
from ...api.messages import Loading, Ready
from ...config.server import ServerConfig
from ...engine_client.client import EngineClient
from ...garbage_collector import freeze_collector
from ...tokenizer.tokenizer import Tokenizer
from .served_model import ServedModel
from .served_role import ServedRole

CONTINUES: ContextVar[bool] = ContextVar("continues", default=False)
"""True where a request that a stopping server still answers asks its engine once more."""


class ServerStatus:
    """The stage of a server's life: starting, ready, stopping, or with a dead engine."""

    def __init__(self, config: ServerConfig, model: ServedModel, client: EngineClient, role: ServedRole):
        self.ready: Ready | None = None
        self.loading = Loading("starting", 0.0)
        self.stopping = False
        self.workers_ready = True
        """False while processes that serve clients start."""
        self.num_freezes = 0
        """Times that the garbage collector was frozen on request."""
        self.weights_lock = asyncio.Lock()  # one weight update at a time
        self.weights_changing = False  # not while they are received beside the steps
        self.staging_weights = False  # a weight update of several requests has begun
        self._waits_for_weights = config.model.checkpoint_engine_wait_weights_before_ready
        self._transfers_kv = config.duties.transfers_kv
        self._role = role
        self._model = model
        self._client = client
        self._instance = uuid.uuid4().hex[:16]

    @property
    def dead(self) -> str | None:
        """The reason why the engine died, None while it lives."""
        return self._client.dead

    @property
    def is_ready(self) -> bool:
        return (self.ready is not None and self._model.tokenizer is not None and self.dead is None
                and self.workers_ready and not self.stopping)

    @property
    def awaits_weights(self) -> bool:
        """True where requests wait for weights of a trainer that have not come."""
        identity = None if self.ready is None else self.ready.model
        return self._waits_for_weights and identity is not None and identity.updates == 0

    @property
    def epoch(self) -> str:
        """An id that changes whenever what this server reported about its engine may have changed."""
        identity = None if self.ready is None else self.ready.model
        version = zlib.crc32(self._model.weight_version.encode())
        switches = f"-{self._role.num_switches}" if self._role.switchable else ""
        return f"{self._instance}-{0 if identity is None else identity.updates}-{version:08x}{switches}"

    def freeze_garbage(self) -> None:
        """Freezes the garbage collector of this process, and of those that serve its clients."""
        self.num_freezes += 1
        freeze_collector()

    def serving_tokenizer(self) -> Tokenizer:
        """The tokenizer of a server that takes requests; raises WorkerUnavailable while it takes none."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        if self.stopping and not CONTINUES.get():
            raise WorkerUnavailable("The server is shutting down.")
        tokenizer = self._model.tokenizer
        if self.ready is None or tokenizer is None:
            raise WorkerUnavailable(f"The server is starting: {self.loading.stage}, {self.loading.fraction:.0%}.",
                                    retry_after=1.0)
        return tokenizer

    def check_serving(self) -> None:
        """Raises WorkerUnavailable while this server takes no requests."""
        self.serving_tokenizer()

    def check_weights_stable(self) -> None:
        """Raises WorkerUnavailable while the first weights are awaited, and while a server of a pair loads other
        weights: its peers are not connected, and a request that waited for that would fail by its deadline where
        another worker could serve it."""
        if self.awaits_weights:
            raise WorkerUnavailable("The server waits for its first weights.", retry_after=1.0)
        if self.weights_changing and self._transfers_kv:
            raise WorkerUnavailable("The server is loading other weights.", retry_after=1.0)

"""A front and its engine ranks: what a server serves over HTTP, and an offline engine by calls."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from ..api.errors import ConfigError
from ..api.messages import Loading, Ready, StartFailed
from ..config.checkpoint import pinned
from ..config.command import sentence_of
from ..config.model import ModelSpec, load_model_spec
from ..config.server import ServerConfig
from ..engine_client.client import EngineClient
from ..engine_client.dp_balancer import DPBalancer
from ..engine_client.multi_node import NodeServer
from ..engine_client.rank_processes import RankProcesses, RankTarget, rank_specs
from ..runner.preflight import preflight
from ..tokenizer.tokenizer import Tokenizer, load_tokenizer
from .chat.formats import ChatFormats
from .context import ServingContext

log = logging.getLogger("baton.front")

Service = Callable[[], contextlib.AbstractAsyncContextManager[Any]]
"""Something that runs beside the engine, from before its ranks start until after they stopped; entering may raise
ConfigError."""

_RANK_GRACE_SECONDS = 5.0
_TOLD_SECONDS = 10.0  # between two lines of one stage of starting
_SHOWN_TOKENS = 8
_LAST_WORDS_SECONDS = 0.5  # a rank that exits while starting may have sent its reason just before


class EngineHost:
    """Use as an asynchronous context manager; ``start`` then starts the ranks, leaving it stops them.

    ``ended`` is set when the engine cannot go on, with a sentence for the operator; ``finish`` sets it from outside.
    ``ready`` is set once requests are served.
    """

    def __init__(self, config: ServerConfig, rank_target: RankTarget, *, spare_torch: bool):
        """``spare_torch``: keep torch out of this process, which must then not want it for anything else. Raises
        ConfigError for what can be known at once; of a model of the hub all but the weights are downloaded for it."""
        self.config = config = dataclasses.replace(config, model=pinned(config.model))
        self._model = load_model_spec(config.model)
        preflight(config, self._model)
        self._rank_target = rank_target
        self._spare_torch = spare_torch
        self._nodes: NodeServer | None = None
        self._next_told = 0.0
        self._stack = contextlib.AsyncExitStack()
        self.front: ServingContext
        self.ended: asyncio.Future[str | None]
        self.ready: asyncio.Event

    async def __aenter__(self) -> EngineHost:
        self.ended, self.ready = asyncio.get_running_loop().create_future(), asyncio.Event()
        schedule = self.config.schedule
        dp = self.config.data_parallel
        client = EngineClient(schedule.max_queued_requests + schedule.max_running_requests * dp.dp_size,
                              self._on_startup,
                              DPBalancer(dp.load_balance_method, dp.dp_size) if dp.dp_size > 1 else None,
                              self.config.parallel.world_size)
        self._stack.push_async_callback(client.close)
        client.start()
        self.front = ServingContext(self.config, self._model, client)
        self._stack.callback(self.front.grammars.close)
        return self

    async def start(self, services: Sequence[Service] = ()) -> None:
        """Begin to load; raises ConfigError where a service cannot run."""
        for service in services:
            await self._stack.enter_async_context(service())
        config, channel = self.config, self.front.client.channel
        meeting = f"file://{channel.folder}/ranks"
        if config.nodes.nnodes > 1:
            meeting = f"tcp://{config.nodes.dist_init_addr}"
            endpoint = channel.listen(config.nodes.link_address[0])
            self._nodes = await self._stack.enter_async_context(NodeServer(config, endpoint, self._on_lost))
        ranks = RankProcesses(self._rank_target, rank_specs(config, channel.to_engine, channel.from_engine, meeting),
                              self._on_rank_exit)
        self._stack.push_async_callback(self._stop_ranks, ranks)
        ranks.start()
        tokenizer = asyncio.create_task(self._load_tokenizer())
        self._stack.callback(tokenizer.cancel)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self._stack.aclose()

    def finish(self, reason: str | None) -> None:
        """End: ``reason`` says why the engine cannot go on, None that it was told to stop."""
        if not self.ended.done():
            self.ended.set_result(reason)

    # ------------------------------------------------------------------ parts

    async def _stop_ranks(self, ranks: RankProcesses) -> None:
        """Ranks that serve leave their loop by themselves; others (loading, or stuck without a peer) are ended."""
        client = self.front.client
        serving = self.front.ready is not None and client.dead is None
        if serving:
            if self._nodes is not None:
                self._nodes.stop()
            client.shut_down()
        await ranks.stop(_RANK_GRACE_SECONDS if serving else 0.0)

    async def _load_tokenizer(self) -> None:
        args = self.config.model
        if self._spare_torch:
            _spare_torch()
        try:
            self.front.tokenizer = await asyncio.to_thread(_tokenizer, args.tokenizer_path or args.model_path,
                                                           None if args.tokenizer_path else args.revision,
                                                           args.chat_template)
            _warn_of_ids(self._model, self.front.tokenizer)
            self.front.chat_formats = ChatFormats.chosen(self.config.chat, self.front.tokenizer.chat_template)
        except ConfigError as error:
            self.finish(str(error))
        except Exception as error:  # whatever a broken tokenizer file makes transformers raise
            self.finish(f"Cannot load the tokenizer: {sentence_of(error)}")
        self._announce()

    # ------------------------------------------------------------------ events

    def _on_startup(self, message: Loading | Ready | StartFailed) -> None:
        match message:
            case Loading():
                self._tell_loading(message)
                self.front.loading = message
            case Ready():
                self.front.ready = message
                self._announce()
            case StartFailed():
                self.front.client.engine_died(message.message)
                self.finish(message.message)

    def _tell_loading(self, message: Loading) -> None:
        """A line for each stage of starting, and every few seconds of one that is long."""
        now = time.monotonic()
        if message.stage != self.front.loading.stage or now >= self._next_told:
            self._next_told = now + _TOLD_SECONDS
            log.info("starting: %s, %.0f %%", message.stage, 100 * message.fraction)

    def _announce(self) -> None:
        if self.front.is_ready:
            log.info("ready: %d tokens of KV cache", self.front.ready.max_total_tokens)  # type: ignore[union-attr]
            self.ready.set()

    def _on_rank_exit(self, rank: int, code: int) -> None:
        if self.front.ready is None:
            asyncio.get_running_loop().call_later(_LAST_WORDS_SECONDS, self.finish,
                                                  f"Rank {rank} ended with exit code {code} while it started"
                                                  f"{_hint(code)}.")
            return
        self._on_lost(f"Rank {rank} of the engine ended with exit code {code}.")

    def _on_lost(self, reason: str) -> None:
        """A part of the engine is gone, and with it all that was held."""
        if self.front.dead is not None:
            return
        log.error(reason)
        self.front.journal.dump(reason)
        self.front.client.engine_died(reason)
        self.finish(reason)


def _hint(code: int) -> str:
    """What an exit code means that the process could not explain itself."""
    if code == -signal.SIGKILL:
        return " (SIGKILL: most likely the host's memory ran out)"
    return f" ({signal.Signals(-code).name})" if -code in set(signal.Signals) else ""


def _warn_of_ids(model: ModelSpec, tokenizer: Tokenizer) -> None:
    """Say which ids the checkpoint's files name and its model does not have."""
    if model.dropped_eos_ids:
        log.warning("The checkpoint names end-of-sequence ids that its model, with ids below %d, does not have; they "
                    "are ignored: %s.", model.vocab_size, ", ".join(map(str, model.dropped_eos_ids)))
    if beyond := tokenizer.tokens_beyond(model.vocab_size):
        shown = ", ".join(f"{name!r} ({token})" for token, name in list(beyond.items())[:_SHOWN_TOKENS])
        more = f" and {len(beyond) - _SHOWN_TOKENS} more" if len(beyond) > _SHOWN_TOKENS else ""
        log.warning("The tokenizer knows %d tokens that the model, with ids below %d, does not have: %s%s. Requests "
                    "with them are refused; resize the model's embeddings to the tokenizer, or serve the tokenizer "
                    "that the model was trained with.", len(beyond), model.vocab_size, shown, more)


def _spare_torch() -> None:
    """Tokenizers do not need the torch that transformers would import beside them, and it would cost every front
    process 300 MB and two seconds (transformers 5.17)."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # an import of it fails
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing


def _tokenizer(path: str, revision: str | None, chat_template: str | None) -> Tokenizer:
    tokenizer = load_tokenizer(path, revision)
    return tokenizer.with_chat_template(chat_template) if chat_template else tokenizer

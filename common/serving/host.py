"""A serving context and its engine ranks, served over HTTP by a server and by calls by an offline engine."""

from __future__ import annotations

import asyncio
import contextlib
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
from ..config.command import describe_error
from ..config.draft_model import pin_revisions
from ..config.model import ModelSpec
from ..config.server import ModelArgs, ServerConfig
from ..engine_client.client import EngineClient
from ..engine_client.dp_balancer import DPBalancer
from ..engine_client.engine_channel import EngineChannel
from ..engine_client.multi_node import NodeServer
from ..engine_client.rank_processes import RankProcesses, RankTarget, rank_specs
from ..models.registry import load_model_spec
from ..obs.progress_bar import ProgressBar
from ..runner.preflight import fitted, preflight
from ..tokenizer.no_tokenizer import no_tokenizer
from ..tokenizer.tokenizer import Tokenizer, load_tokenizer
from .context.served_model import ChatFormats
from .context.serving_context import ServingContext
from .tool_servers.start import start_tool_servers

log = logging.getLogger("baton.server")

Service = Callable[[], contextlib.AbstractAsyncContextManager[Any]]
"""A service that runs with the engine, from before its ranks start until after they stopped; entering may raise
ConfigError."""

_RANK_GRACE_SECONDS = 5.0
_PROGRESS_SECONDS = 10.0  # between two log lines of one stage of starting
_MAX_LOGGED_TOKENS = 8
_FAILURE_GRACE_SECONDS = 0.5  # a rank that exits while starting may have sent its reason just before


class EngineHost:
    """Starts and stops the ranks of one engine. Use as an asynchronous context manager: ``start`` starts the ranks,
    leaving it stops them.

    ``ended`` is set when the engine cannot continue, with a sentence for the operator; ``finish`` sets it from outside.
    ``ready`` is set once requests are served.
    """

    def __init__(self, config: ServerConfig, rank_target: RankTarget, *, without_torch: bool):
        """``without_torch``: keep torch out of this process, which must then not import it for anything else. Raises
        ConfigError for mistakes that can be known at once, for which all files of a hub's model but the weights are
        downloaded."""
        config = pin_revisions(config)
        self._model = load_model_spec(config.model)
        self.config = config = fitted(config, self._model)
        preflight(config, self._model)
        self._rank_target = rank_target
        self._without_torch = without_torch
        self._nodes: NodeServer | None = None
        self._next_progress = 0.0
        self._bar = ProgressBar(enabled=not self.config.logs.log_json)
        self._stage = "", 0.0  # of starting, and when it began
        self._stack = contextlib.AsyncExitStack()
        self.context: ServingContext
        self.ended: asyncio.Future[str | None]
        self.ready: asyncio.Event

    async def __aenter__(self) -> EngineHost:
        self.ended, self.ready = asyncio.get_running_loop().create_future(), asyncio.Event()
        schedule = self.config.schedule
        dp = self.config.data_parallel
        self._channel = EngineChannel()
        client = EngineClient(schedule.max_queued_requests + schedule.max_running_requests * dp.dp_size,
                              self._on_startup,
                              DPBalancer(dp.load_balance_method, dp.dp_size) if dp.dp_size > 1 else None,
                              self.config.parallel.world_size, self._channel)
        self._stack.push_async_callback(client.close)
        client.start()
        self.context = ServingContext(self.config, self._model, client)
        self._stack.callback(self.context.planner.grammars.close)
        return self

    @property
    def folder(self) -> str:
        """A folder that only this user can enter, for sockets."""
        return self._channel.folder

    async def start(self, services: Sequence[Service] = ()) -> None:
        """Starts the services and the ranks, which load; raises ConfigError where a service cannot run."""
        self.context.tool_servers = await start_tool_servers(self.config.responses.tool_server)
        await self._stack.enter_async_context(self.context.role)
        for service in services:
            await self._stack.enter_async_context(service())
        config, channel = self.config, self._channel
        address = config.nodes.dist_init_addr
        rendezvous = f"file://{channel.folder}/ranks" if address is None else f"tcp://{address}"
        if config.nodes.nnodes > 1:
            endpoint = channel.listen(config.nodes.link_address[0])
            self._nodes = await self._stack.enter_async_context(NodeServer(config, endpoint, self._on_lost,
                                                                            lambda: self.finish(None)))
        ranks = RankProcesses(self._rank_target, rank_specs(config, channel.to_engine, channel.from_engine, rendezvous),
                              self._on_rank_exit)
        self._stack.push_async_callback(self._stop_ranks, ranks)
        ranks.start()
        tokenizer = asyncio.create_task(self._load_tokenizer())
        self._stack.callback(tokenizer.cancel)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self._stack.aclose()

    def finish(self, reason: str | None) -> None:
        """Ends the engine; ``reason`` says why it cannot continue, None that a stop was requested."""
        if not self.ended.done():
            self.ended.set_result(reason)

    # ------------------------------------------------------------------ ranks and tokenizer

    async def _stop_ranks(self, ranks: RankProcesses) -> None:
        """Ranks that serve leave their loop by themselves; others (loading, or stuck without a peer) are killed."""
        client = self.context.client
        serving = self.context.status.ready is not None and client.dead is None
        if serving:
            if self._nodes is not None:
                self._nodes.stop()
            client.shut_down()
        await ranks.stop(_RANK_GRACE_SECONDS if serving else 0.0)

    async def _load_tokenizer(self) -> None:
        try:
            await load_tokenizer_of(self.context, without_torch=self._without_torch)
            if not self.config.model.skip_tokenizer_init:
                assert self.context.model.tokenizer is not None
                _warn_of_unknown_ids(self._model, self.context.model.tokenizer)
        except ConfigError as error:
            self.finish(str(error))
        self.check_ready()

    # ------------------------------------------------------------------ events

    def _on_startup(self, message: Loading | Ready | StartFailed) -> None:
        match message:
            case Loading():
                self._log_loading(message)
                self.context.status.loading = message
            case Ready():
                self._bar.clear()
                if self.config.observe.show_time_cost:
                    self._log_stage(time.monotonic())
                self.context.status.ready = message
                self.context.model.take_version(message.model)
                self.check_ready()
            case StartFailed():
                self._bar.clear()
                self.context.client.engine_died(message.message)
                self.finish(message.message)

    def _log_loading(self, message: Loading) -> None:
        """Logs a line for each stage of starting, and one every few seconds of a long stage."""
        now = time.monotonic()
        if self.config.observe.show_time_cost and message.stage != self._stage[0]:
            self._log_stage(now)
            self._stage = message.stage, now
        if message.stage != self.context.status.loading.stage or now >= self._next_progress:
            self._next_progress = now + _PROGRESS_SECONDS
            self._bar.clear()
            log.info("starting: %s, %.0f %%", message.stage, 100 * message.fraction)
        self._bar.draw(message.stage, message.fraction)

    def _log_stage(self, now: float) -> None:
        """Logs how long the stage of starting took that ends now."""
        stage, began = self._stage
        if stage:
            log.info("starting: %s took %.2f s", stage, now - began)

    def check_ready(self) -> None:
        """Sets ``ready`` if requests are served."""
        if not self.ready.is_set() and self.context.status.is_ready:
            log.info("ready: %d tokens of KV cache", self.context.status.ready.max_total_tokens)  # type: ignore[union-attr]
            self.ready.set()

    def _on_rank_exit(self, rank: int, code: int) -> None:
        if self.context.status.ready is None:
            asyncio.get_running_loop().call_later(_FAILURE_GRACE_SECONDS, self.finish,
                                                  f"Rank {rank} ended with exit code {code} while it started"
                                                  f"{_hint(code)}.")
            return
        self._on_lost(f"Rank {rank} of the engine ended with exit code {code}.")

    def _on_lost(self, reason: str) -> None:
        """A rank or a node is gone, and with it the engine and its requests."""
        if self.context.status.dead is not None:
            return
        log.error(reason)
        self.context.telemetry.request_log.dump(reason)
        self.context.client.engine_died(reason)
        self.finish(reason)


async def load_tokenizer_of(context: ServingContext, *, without_torch: bool) -> None:
    """Loads the tokenizer of a server, and the formats that its chat template selects. Raises ConfigError."""
    args, model = context.config.model, context.model
    if without_torch and not args.trust_remote_code:  # Its code may import torch.
        _block_torch()
    try:
        tokenizer = await asyncio.to_thread(_tokenizer, args)
    except ConfigError:
        raise
    except Exception as error:  # whatever a broken tokenizer file makes transformers raise
        raise ConfigError(f"Cannot load the tokenizer: {describe_error(error)}") from None
    model.chat_formats = ChatFormats.select(context.config.chat, tokenizer.chat_template)
    model.tokenizer = tokenizer


def _hint(code: int) -> str:
    """The meaning of an exit code that the process could not explain itself."""
    if code == -signal.SIGKILL:
        return " (SIGKILL: most likely the host's memory ran out)"
    return f" ({signal.Signals(-code).name})" if -code in set(signal.Signals) else ""


def _warn_of_unknown_ids(model: ModelSpec, tokenizer: Tokenizer) -> None:
    """Warns of ids that the checkpoint's files name and its model does not have."""
    if model.dropped_eos_ids:
        log.warning("The checkpoint names end-of-sequence ids that its model, with ids below %d, does not have; they "
                    "are ignored: %s.", model.vocab_size, ", ".join(map(str, model.dropped_eos_ids)))
    if beyond := tokenizer.tokens_beyond(model.vocab_size):
        shown = ", ".join(f"{name!r} ({token})" for token, name in list(beyond.items())[:_MAX_LOGGED_TOKENS])
        more = f" and {len(beyond) - _MAX_LOGGED_TOKENS} more" if len(beyond) > _MAX_LOGGED_TOKENS else ""
        log.warning("The tokenizer knows %d tokens that the model, with ids below %d, does not have: %s%s. Requests "
                    "with them are refused; resize the model's embeddings to the tokenizer, or serve the tokenizer "
                    "that the model was trained with.", len(beyond), model.vocab_size, shown, more)


def _block_torch() -> None:
    """Keeps transformers from importing torch, which tokenizers do not need: it would cost every API server process
    300 MB and two seconds (transformers 5.17)."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # an import of it fails
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing


def _tokenizer(args: ModelArgs) -> Tokenizer:
    if args.skip_tokenizer_init:
        return no_tokenizer()
    tokenizer = load_tokenizer(args.tokenizer_path or args.model_path, None if args.tokenizer_path else args.revision,
                               trust_remote_code=args.trust_remote_code, download_dir=args.download_dir)
    if args.hf_chat_template_name is not None:
        return tokenizer.with_named_template(args.hf_chat_template_name)
    return tokenizer.with_chat_template(args.chat_template) if args.chat_template else tokenizer

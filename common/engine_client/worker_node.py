"""Main of a node other than node 0: it has no API server, and runs ranks for node 0's."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from ..api.errors import ConfigError
from ..config.server import ServerConfig
from ..obs.logging import setup_logging
from .multi_node import NodeLink, join
from .rank_processes import RankProcesses, RankTarget, rank_specs

log = logging.getLogger("baton.node")

_GRACE_SECONDS = 5.0


def run_node(config: ServerConfig, target: RankTarget) -> int:
    """Run ranks until node 0 ends or sends ``stop``, which a signal asks it for; a second one ends the node. Returns
    the process's exit code, with a sentence on stderr where it is not 0."""
    setup_logging(config.logs, f"node{config.nodes.node_rank}")
    try:
        asyncio.run(_Node(config, target).run())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


class _Node:
    def __init__(self, config: ServerConfig, target: RankTarget):
        self._config = config
        self._target = target

    async def run(self) -> None:
        """Run until the node ends; raises ConfigError, with a sentence for the operator, unless a stop was
        requested, of node 0 or of this one."""
        self._ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._is_stopped = False
        self._connection: NodeLink | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        joining = asyncio.create_task(join(self._config))
        await asyncio.wait((joining, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():
            joining.cancel()
            return
        connection, from_engine = joining.result()
        self._connection = connection
        specs = rank_specs(self._config, "", from_engine, f"tcp://{self._config.nodes.dist_init_addr}")
        ranks = RankProcesses(self._target, specs, self._on_rank_exit)
        ranks.start()
        log.info("ranks %d to %d run here", specs[0].rank, specs[-1].rank)
        listening = asyncio.create_task(self._listen(connection))
        try:
            reason = await self._ended
            if reason is not None:
                connection.send({"failed": f"Node {self._config.nodes.node_rank}: {reason}"})
        finally:
            listening.cancel()
            await connection.close()
            await ranks.stop(_GRACE_SECONDS if self._ended.done() and self._ended.result() is None else 0.0)
        if reason is not None and not self._is_stopped:
            raise ConfigError(reason)

    def _on_signal(self) -> None:
        """Lets node 0 answer its requests first, as where it is stopped itself."""
        if self._connection is None or self._is_stopped:
            self._is_stopped = True
            self._finish("The node was asked to stop.")
            return
        self._is_stopped = True
        self._connection.send({"stopping": True})
        grace = self._config.http.shutdown_grace_secs + _GRACE_SECONDS
        asyncio.get_running_loop().call_later(grace, self._finish, "The node was asked to stop.")

    async def _listen(self, connection: NodeLink) -> None:
        message = await connection.receive()
        self._finish(None if message is not None and "stop" in message else "Node 0 of the engine is gone.")

    def _on_rank_exit(self, rank: int, code: int) -> None:
        if code:  # 0 is an orderly end, which this node's stop will follow
            self._finish(f"Rank {rank} of the engine ended with exit code {code}.")

    def _finish(self, reason: str | None) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)

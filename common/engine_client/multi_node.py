"""NodeServer of a server whose ranks are on several hosts: node 0 has the API server, the others only run ranks.

Node 0 listens on the port above ``--dist-init-addr``. Every other node connects there, sends its node rank, and
receives the API server's address for its ranks. The connection lives as long as both nodes: lines of JSON, with a
heartbeat every second. Its end is the end of the engine, on both sides. Any client that reaches the port can join: it
belongs inside the cluster, like torch.distributed's port below it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..api.errors import ConfigError
from ..config.server import ServerConfig

_HEARTBEAT_SECONDS = 1.0
_TIMEOUT_SECONDS = 20.0
_RETRY_SECONDS = 0.2

Message = dict[str, Any]


def shared_flags(config: ServerConfig) -> Message:
    """The flags that must be equal on all nodes."""
    return {"model": config.model.model_path, "mode": config.mode, "nnodes": config.nodes.nnodes,
            "tp_size": config.parallel.tp_size, "pp_size": config.parallel.pp_size,
            "pp_layer_partition": list(config.parallel.pp_layer_partition), "ep_size": config.parallel.ep_size,
            "dp_size": config.dp_size,
            **{name: getattr(config.parallel, name) for name in (
                "moe_a2a_backend", "enable_eplb", "ep_num_redundant_experts", "eplb_rebalance_num_iterations",
                "eplb_algorithm", "eplb_rebalance_layers_per_chunk", "eplb_min_rebalancing_utilization_threshold",
                "init_expert_location", "ep_dispatch_algorithm", "expert_distribution_recorder_mode",
                "expert_distribution_recorder_buffer_size", "enable_expert_distribution_metrics")},
            "enable_dp_lm_head": config.data_parallel.enable_dp_lm_head}


class NodeLink:
    """One connection between two nodes, with heartbeats in both directions."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        self._heartbeat = asyncio.create_task(self._send_heartbeats())

    def send(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> Message | None:
        """The next message that is no heartbeat; None after a disconnect or a timeout."""
        while True:
            try:
                line = await asyncio.wait_for(self._reader.readline(), _TIMEOUT_SECONDS)
                message = json.loads(line) if line else None
            except (OSError, ValueError, TimeoutError, asyncio.TimeoutError):
                return None
            if message is None or (isinstance(message, dict) and message):
                return message

    async def close(self) -> None:
        """Close the connection after sending what is queued."""
        self._heartbeat.cancel()
        with contextlib.suppress(OSError, asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), 1.0)
        self._writer.close()

    async def _send_heartbeats(self) -> None:
        while True:
            self.send({})
            await asyncio.sleep(_HEARTBEAT_SECONDS)


class NodeServer:
    """Node 0's side: listens while the ``async with`` block runs. Other nodes end with an error when it is left without
    ``stop``.

    ``on_lost(sentence)`` is called when a node ends, or reports the end of one of its ranks, ``on_stop()`` when one was
    asked to stop: it ends once it is sent ``stop``. Entering raises ConfigError where the port is not free.
    """

    def __init__(self, config: ServerConfig, from_engine: str, on_lost: Callable[[str], None],
                 on_stop: Callable[[], None]):
        """``from_engine``: the ZMQ endpoint that the other nodes' ranks send to."""
        self._on_stop = on_stop
        self._config = config
        self._from_engine = from_engine
        self._on_lost = on_lost
        self._connections: dict[int, NodeLink] = {}
        self._stopping = False

    async def __aenter__(self) -> NodeServer:
        host, port = self._config.nodes.link_address
        try:
            self._server = await asyncio.start_server(self._serve, host, port)
        except OSError as error:
            raise ConfigError(f"Cannot listen on {host}:{port}, the port above --dist-init-addr, for the other nodes: "
                              f"{error.strerror or error}.") from None
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        self._stopping = True
        self._server.close()
        for connection in list(self._connections.values()):
            await connection.close()

    def stop(self) -> None:
        """Notify the other nodes that their ranks are about to end."""
        self._stopping = True
        for connection in self._connections.values():
            connection.send({"stop": True})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = NodeLink(reader, writer)
        hello = await connection.receive()
        node = hello.get("node") if hello is not None else None
        refusal = self._refusal(hello)
        if refusal is not None or not isinstance(node, int):
            connection.send({"refused": refusal})
            await connection.close()
            return
        self._connections[node] = connection
        connection.send({"from_engine": self._from_engine})
        message = await connection.receive()
        if message is not None and "stopping" in message:
            self._on_stop()
            message = await connection.receive()
        del self._connections[node]
        await connection.close()
        if not self._stopping:
            self._on_lost(str(message["failed"]) if message is not None and "failed" in message else
                          f"Node {node} of the engine is gone.")

    def _refusal(self, hello: Message | None) -> str | None:
        """Reason why a node cannot join, as a sentence; None where it can."""
        if hello is None or not isinstance(hello.get("node"), int):
            return "It does not say which node it is."
        if not 0 < hello["node"] < self._config.nodes.nnodes:
            return f"--node-rank must be below --nnodes {self._config.nodes.nnodes}."
        if hello["node"] in self._connections:
            return f"There is a node {hello['node']} already; give each its own --node-rank."
        ours = shared_flags(self._config)
        differing = [f"{name} is {ours[name]!r} on node 0 and {hello.get(name)!r} on node {hello['node']}"
                     for name in ours if hello.get(name) != ours[name]]
        return f"The nodes' flags differ: {', '.join(differing)}." if differing else None


async def join(config: ServerConfig, timeout: float = 600.0) -> tuple[NodeLink, str]:
    """Another node's side: returns the connection, and the API server's endpoint for the node's ranks. Waits for node 0
    up to ``timeout`` seconds; raises ConfigError."""
    host, port = config.nodes.link_address
    end = asyncio.get_running_loop().time() + timeout
    while True:
        try:
            connection = NodeLink(*await asyncio.open_connection(host, port))
            break
        except OSError as error:
            if asyncio.get_running_loop().time() >= end:
                raise ConfigError(f"Node 0 cannot be reached at {host}:{port}, the port above --dist-init-addr: "
                                  f"{error.strerror or error}.") from None
            await asyncio.sleep(_RETRY_SECONDS)
    connection.send({"node": config.nodes.node_rank, **shared_flags(config)})
    answer = await connection.receive()
    if answer is None or "from_engine" not in answer:
        await connection.close()
        raise ConfigError(f"Node 0 does not take this node: {answer['refused'] if answer else 'it is gone.'}")
    return connection, answer["from_engine"]

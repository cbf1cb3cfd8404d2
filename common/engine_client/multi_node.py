"""A server whose ranks spread over several hosts: the first node's front, and the others, which only run ranks.

Node 0 listens on the port above ``--dist-init-addr``. Every other node connects there, says who it is, and learns
where its ranks find the front. The connection then stands for as long as both live: lines of JSON, a sign of life every
second among them. Its end is the end of the engine, on both sides. Whoever reaches the port can take part: it belongs
inside the cluster, as torch.distributed's beside it.
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

_SIGN_OF_LIFE_SECONDS = 1.0
_SILENCE_SECONDS = 20.0
_RETRY_SECONDS = 0.2

Message = dict[str, Any]


def description(config: ServerConfig) -> Message:
    """What must be the same on all nodes."""
    return {"model": config.model.model_path, "mode": config.mode, "nnodes": config.nodes.nnodes,
            "tp_size": config.parallel.tp_size, "pp_size": config.parallel.pp_size,
            "pp_layer_partition": list(config.parallel.pp_layer_partition), "ep_size": config.parallel.ep_size,
            "dp_size": config.dp_size,
            **{name: getattr(config.parallel, name) for name in (
                "moe_a2a_backend", "enable_eplb", "ep_num_redundant_experts", "eplb_rebalance_num_iterations",
                "expert_distribution_recorder_mode")},
            "enable_dp_lm_head": config.data_parallel.enable_dp_lm_head}


class NodeLink:
    """One connection between two nodes, with signs of life in both directions."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        self._beating = asyncio.create_task(self._beat())

    def send(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> Message | None:
        """The next message that is no sign of life; None when the other side is gone, or silent for too long."""
        while True:
            try:
                line = await asyncio.wait_for(self._reader.readline(), _SILENCE_SECONDS)
                message = json.loads(line) if line else None
            except (OSError, ValueError, TimeoutError, asyncio.TimeoutError):
                return None
            if message is None or (isinstance(message, dict) and message):
                return message

    async def close(self) -> None:
        """What was sent goes out first."""
        self._beating.cancel()
        with contextlib.suppress(OSError, asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(self._writer.drain(), 1.0)
        self._writer.close()

    async def _beat(self) -> None:
        while True:
            self.send({})
            await asyncio.sleep(_SIGN_OF_LIFE_SECONDS)


class Nodes:
    """Node 0's side: ``async with Nodes(...)`` listens until the block is left. Others that were not told to ``stop``
    by then end with an error.

    ``on_lost(sentence)`` is called when a node ends, or says that one of its ranks did. Entering raises ConfigError
    where the port is taken.
    """

    def __init__(self, config: ServerConfig, from_engine: str, on_lost: Callable[[str], None]):
        """``from_engine``: the ZMQ endpoint that the other nodes' ranks send to."""
        self._config = config
        self._from_engine = from_engine
        self._on_lost = on_lost
        self._lines: dict[int, NodeLink] = {}
        self._stopping = False

    async def __aenter__(self) -> Nodes:
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
        for line in list(self._lines.values()):
            await line.close()

    def stop(self) -> None:
        """Tell the other nodes that their ranks are about to end."""
        self._stopping = True
        for line in self._lines.values():
            line.send({"stop": True})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = NodeLink(reader, writer)
        hello = await line.receive()
        node = hello.get("node") if hello is not None else None
        why = self._why_not(hello)
        if why is not None or not isinstance(node, int):
            line.send({"refused": why})
            await line.close()
            return
        self._lines[node] = line
        line.send({"from_engine": self._from_engine})
        message = await line.receive()
        del self._lines[node]
        await line.close()
        if not self._stopping:
            self._on_lost(str(message["failed"]) if message is not None and "failed" in message else
                          f"Node {node} of the engine is gone.")

    def _why_not(self, hello: Message | None) -> str | None:
        """Why a node cannot take part, as a sentence."""
        if hello is None or not isinstance(hello.get("node"), int):
            return "It does not say which node it is."
        if not 0 < hello["node"] < self._config.nodes.nnodes:
            return f"--node-rank must be below --nnodes {self._config.nodes.nnodes}."
        if hello["node"] in self._lines:
            return f"There is a node {hello['node']} already; give each its own --node-rank."
        ours = description(self._config)
        differing = [f"{name} is {ours[name]!r} on node 0 and {hello.get(name)!r} on node {hello['node']}"
                     for name in ours if hello.get(name) != ours[name]]
        return f"The nodes' flags differ: {', '.join(differing)}." if differing else None


async def join(config: ServerConfig, timeout: float = 600.0) -> tuple[NodeLink, str]:
    """Another node's side: the connection, and where its ranks find the front. Waits for node 0 up to ``timeout``
    seconds; raises ConfigError."""
    host, port = config.nodes.link_address
    end = asyncio.get_running_loop().time() + timeout
    while True:
        try:
            line = NodeLink(*await asyncio.open_connection(host, port))
            break
        except OSError as error:
            if asyncio.get_running_loop().time() >= end:
                raise ConfigError(f"Node 0 cannot be reached at {host}:{port}, the port above --dist-init-addr: "
                                  f"{error.strerror or error}.") from None
            await asyncio.sleep(_RETRY_SECONDS)
    line.send({"node": config.nodes.node_rank, **description(config)})
    answer = await line.receive()
    if answer is None or "from_engine" not in answer:
        await line.close()
        raise ConfigError(f"Node 0 does not take this node: {answer['refused'] if answer else 'it is gone.'}")
    return line, answer["from_engine"]

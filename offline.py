"""``baton.Engine``: generate without a server, from a script, a notebook or a test."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import secrets
import socket
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from .common.api.errors import ConfigError, InvalidRequest
from .common.commands.base import Endpoint
from .common.commands.methods import CommandMethods
from .common.config.cli import build
from .common.config.server import ServerConfig
from .common.config.server.sglang_flags import SGLANG_FLAGS
from .common.serving.embeddings.handler import encode_body, rerank_body, score_body
from .common.serving.offline import Cluster, EngineProcesses
from .common.serving.sessions.handler import close_session_body, open_session_body

T = TypeVar("T")
_END = object()


class Engine(CommandMethods):
    """A unified engine, or a prefill and a decode engine, in processes of their own below this one.

    ::

        with Engine("tinychat") as engine:
            engine.generate("The capital of France is", {"temperature": 0})["text"]

    Flags of ``launch_server`` are keywords, with underscores: ``Engine("tinychat", page_size=16, device="cpu")``;
    SGLang's are taken, translated or refused as there.
    With ``prefill`` and ``decode``, each a (maybe empty) dict of flags for that role alone, two engines hand the KV
    cache over: ``Engine("tinychat", prefill={}, decode={"base_gpu_id": 1})``.

    Bodies are those of ``/generate`` and ``/v1/chat/completions``; their error answers raise ServingError here. Each
    administrative endpoint (``/flush_cache``, ``/start_profile``, ...) is a method with the fields of its body, and
    returns the engines' messages, a line each. All methods may be called from any thread, the ``async_`` ones on any
    event loop. ConfigError is raised where the engine cannot start. Processes are spawned: a script needs
    ``if __name__ == "__main__":`` around its use.
    """

    def __init__(self, model_path: str | None = None, *, prefill: Mapping[str, Any] | None = None,
                 decode: Mapping[str, Any] | None = None, **flags: Any):
        super().__init__()
        if (prefill is None) != (decode is None):
            raise ConfigError("prefill and decode go together: give both, or neither for one engine.")
        if model_path is not None:
            flags["model_path"] = model_path
        self._thread = _LoopThread()
        self._close = weakref.finalize(self, self._thread.close)  # at the latest when the interpreter exits
        try:
            parts = _unified(flags) if prefill is None or decode is None else _pair(flags, prefill, decode)
            self._cluster = self._thread.run(self._thread.enter(Cluster(parts)))
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Stops the engine's processes and aborts running requests. Calling it again does nothing."""
        self._close()

    # ------------------------------------------------------------------ requests

    def generate(self, prompt: str | list[str] | None = None, sampling_params: Any = None, *, stream: bool = False,
                 **fields: Any) -> Any:
        """The answer to a prompt, a list of answers to a list; with ``stream`` an iterator of answers so far.

        ``fields`` are further ones of ``/generate``: ``input_ids``, ``return_logprob``, ``rid`` and so on.
        """
        body = _generate_body(prompt, sampling_params, stream, fields)
        if stream:
            return self._iterate(self._cluster.stream_generate(body))
        return self._thread.run(self._cluster.generate(body))

    async def async_generate(self, prompt: str | list[str] | None = None, sampling_params: Any = None, *,
                             stream: bool = False, **fields: Any) -> Any:
        """As ``generate``; with ``stream`` the result is an asynchronous iterator."""
        body = _generate_body(prompt, sampling_params, stream, fields)
        if stream:
            return self._async_iterate(self._cluster.stream_generate(body))
        return await asyncio.wrap_future(self._thread.submit(self._cluster.generate(body)))

    def chat(self, messages: list[dict[str, Any]], *, stream: bool = False, **fields: Any) -> Any:
        """The answer of ``/v1/chat/completions``, as a dict; with ``stream`` an iterator of its chunks."""
        body = {**fields, "messages": messages, "stream": stream}
        if stream:
            return self._iterate(self._cluster.stream_chat(body))
        return self._thread.run(self._cluster.chat(body))

    async def async_chat(self, messages: list[dict[str, Any]], *, stream: bool = False, **fields: Any) -> Any:
        """As ``chat``; with ``stream`` the result is an asynchronous iterator."""
        body = {**fields, "messages": messages, "stream": stream}
        if stream:
            return self._async_iterate(self._cluster.stream_chat(body))
        return await asyncio.wrap_future(self._thread.submit(self._cluster.chat(body)))

    # ------------------------------------------------------------------ vectors and scores

    def encode(self, prompt: str | list[str] | None = None, **fields: Any) -> Any:
        """The answer of ``/encode`` to a text, or a list of answers to a list; engines with ``is_embedding`` have it.

        ``fields``: ``input_ids``, ``rid``, ``priority``.
        """
        return self._thread.run(self._encoded(prompt, fields))

    async def async_encode(self, prompt: str | list[str] | None = None, **fields: Any) -> Any:
        """As ``encode``."""
        return await asyncio.wrap_future(self._thread.submit(self._encoded(prompt, fields)))

    def rerank(self, prompt: Sequence[Sequence[str]] | None = None, **fields: Any) -> Any:
        """The scores of pairs of a query and a document, in their order, each as ``embedding``; with ``query`` and
        ``documents`` in place of pairs the answer of ``/v1/rerank``, the most relevant first."""
        return self._thread.run(self._reranked(prompt, fields))

    async def async_rerank(self, prompt: Sequence[Sequence[str]] | None = None, **fields: Any) -> Any:
        """As ``rerank``."""
        return await asyncio.wrap_future(self._thread.submit(self._reranked(prompt, fields)))

    def score(self, query: str | list[int], items: str | list[str] | list[list[int]], label_token_ids: list[int],
              apply_softmax: bool = False, item_first: bool = False) -> list[list[float]]:
        """The probability of each label as the next token after ``query`` and each item; see ``/v1/score``."""
        return self._thread.run(self._scored(query, items, label_token_ids, apply_softmax, item_first))

    async def async_score(self, query: str | list[int], items: str | list[str] | list[list[int]],
                          label_token_ids: list[int], apply_softmax: bool = False,
                          item_first: bool = False) -> list[list[float]]:
        """As ``score``."""
        return await asyncio.wrap_future(self._thread.submit(
            self._scored(query, items, label_token_ids, apply_softmax, item_first)))

    async def _encoded(self, prompt: str | list[str] | None, fields: Mapping[str, Any]) -> Any:
        return await self._cluster.answer(encode_body, {**fields, **({} if prompt is None else {"text": prompt})})

    async def _reranked(self, prompt: Sequence[Sequence[str]] | None, fields: Mapping[str, Any]) -> Any:
        return await (self._cluster.answer(rerank_body, fields) if prompt is None else
                      self._cluster.rerank_pairs(prompt))

    async def _scored(self, query: Any, items: Any, label_token_ids: list[int], apply_softmax: bool,
                      item_first: bool) -> list[list[float]]:
        answer = await self._cluster.answer(score_body, {
            "query": query, "items": items, "label_token_ids": label_token_ids, "apply_softmax": apply_softmax,
            "item_first": item_first})
        scores: list[list[float]] = answer["scores"]
        return scores

    # ------------------------------------------------------------------ tokens and sessions

    @property
    def tokenizer_manager(self) -> TokenizerManager:
        """Has ``tokenizer``, that of transformers, where SGLang's programs look for it."""
        return TokenizerManager(self)

    def open_session(self, capacity_of_str_len: int, session_id: str | None = None) -> str:
        """Opens a session of so many tokens and returns its id; ``generate`` continues it with ``session_params``."""
        body = {"capacity_of_str_len": capacity_of_str_len, "session_id": session_id}
        opened: str = self._thread.run(self._cluster.answer(open_session_body, body))
        return opened

    def close_session(self, session_id: str) -> None:
        """Closes a session; raises NotFound for one that is not open."""
        self._thread.run(self._cluster.answer(close_session_body, {"session_id": session_id}))

    def tokenize(self, prompt: str | list[str] | None = None, *, messages: list[dict[str, Any]] | None = None,
                 **fields: Any) -> Any:
        """The answer of ``/tokenize`` to a text, texts, or the messages of a chat, as a dict."""
        given = {name: value for name, value in (("prompt", prompt), ("messages", messages)) if value is not None}
        return self._thread.run(self._cluster.tokenize({**fields, **given}))

    def detokenize(self, tokens: list[int] | list[list[int]], **fields: Any) -> Any:
        """The answer of ``/detokenize``, as a dict."""
        return self._thread.run(self._cluster.detokenize({**fields, "tokens": tokens}))

    # ------------------------------------------------------------------ the engine as a whole

    def state(self) -> Any:
        """A snapshot of the engine that answers: pages, requests, counters."""
        return self._thread.run(self._cluster.context.client.state())

    def get_server_info(self) -> dict[str, Any]:
        """The answer of ``/get_server_info`` of the engine that answers: its flags and its state."""
        info: dict[str, Any] = self._thread.run(self._cluster.server_info())
        return info

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Aborts a request (all choices of it), or all: they are answered with the tokens so far."""
        if bool(rid) is abort_all:
            raise InvalidRequest("Give a rid, or abort_all.", param="rid")
        self._thread.run(self._cluster.abort(rid))

    def _run_endpoint(self, endpoint: Endpoint, arguments: Mapping[str, Any]) -> str:
        return "\n".join(self._thread.run(self._cluster.run_endpoint(endpoint, arguments)))

    # ------------------------------------------------------------------ streams

    def _iterate(self, items: AsyncGenerator[Any, None]) -> Iterator[Any]:
        try:
            while (item := self._thread.run(anext(items, _END))) is not _END:  # type: ignore[arg-type]
                yield item
        finally:
            self._thread.run(items.aclose())

    async def _async_iterate(self, items: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
        try:
            while True:
                next_one = self._thread.submit(anext(items, _END))  # type: ignore[arg-type]
                if (item := await asyncio.wrap_future(next_one)) is _END:
                    return
                yield item
        finally:
            await asyncio.wrap_future(self._thread.submit(items.aclose()))


class TokenizerManager:
    """The part of SGLang's ``engine.tokenizer_manager`` that programs use."""

    def __init__(self, engine: Engine):
        self._engine = engine

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, of transformers; None with ``skip_tokenizer_init``."""
        return self._engine._cluster.hf_tokenizer()

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """As the engine's."""
        self._engine.abort_request(rid, abort_all)


class _LoopThread:
    """An event loop in a thread. Rank processes die with the thread that started them, so it lives until ``close``."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stack = contextlib.AsyncExitStack()
        self._thread = threading.Thread(target=self._loop.run_forever, name="baton-engine", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("The engine was shut down.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.submit(work).result()

    async def enter(self, cluster: Cluster) -> Cluster:
        return await self._stack.enter_async_context(cluster)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self.run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _generate_body(prompt: Any, sampling_params: Any, stream: bool, fields: dict[str, Any]) -> dict[str, Any]:
    body = {**fields, "stream": stream}
    if prompt is not None:
        body["text"] = prompt
    if sampling_params is not None:
        body["sampling_params"] = sampling_params
    return body


def _unified(flags: Mapping[str, Any]) -> list[EngineProcesses]:
    from .common.serving.unified_server import run_rank

    return [EngineProcesses(build(ServerConfig, flags, foreign=SGLANG_FLAGS), run_rank)]


def _pair(flags: Mapping[str, Any], prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> list[EngineProcesses]:
    from .decode.launch import run_rank as run_decode
    from .kvtransfer.bootstrap import BootstrapServer
    from .prefill.launch import run_rank as run_prefill

    common = {"disaggregation_bootstrap_port": _free_port(), **flags}
    one = build(ServerConfig, {**common, **prefill, "disaggregation_mode": "prefill"}, foreign=SGLANG_FLAGS)
    two = build(ServerConfig, {**common, **decode, "disaggregation_mode": "decode"}, foreign=SGLANG_FLAGS)
    args = one.disaggregation
    address = one.http.host, args.disaggregation_bootstrap_port
    return [EngineProcesses(one, run_prefill, [lambda: BootstrapServer(*address, secret=args.cluster_secret)]),
            EngineProcesses(two, run_decode)]


def _free_port() -> int:
    """A port for the bootstrap server, which listens on it a moment later. It lies below the range that kernels give to
    outgoing connections, one of which could occupy it by then."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port

"""What the routes of one server share: configuration, engine, tokenizer, and where the server's life stands."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property

import msgspec

from ..api.errors import EngineDead, InvalidRequest, NotFound, ServingError, WorkerUnavailable
from ..api.messages import Bootstrap, Generate, Loading, Pooling, Ready
from ..api.sampling import SamplingParams
from ..api.token_ids import check_ids
from ..config.checkpoint import pooling_of
from ..config.model import ModelSpec
from ..config.server import ServerConfig
from ..engine_client.client import EngineClient
from ..grammar.service import GrammarService
from ..obs.metrics import ServerMetrics
from ..tokenizer.tokenizer import Tokenizer
from .chat.formats import ChatFormats
from .generation import Generation
from .lifecycle.api_keys import ApiKeys
from .lifecycle.arrivals import Arrivals
from .lifecycle.in_flight import InFlight
from .lifecycle.request_log import RequestLog
from .lifecycle.traces import Traces
from .native.schema import LogprobOptions
from .protocol.bootstrap import BootstrapFields, bootstraps, chosen_rank
from .protocol.prompts import Prompts, output_limit
from .sessions.store import Sessions

CLIENT: ContextVar[Callable[[], str]] = ContextVar("client", default=str)
"""Tells who asks: the key that came with the HTTP request (its hash), or else the address that it came from."""


class ServingContext:
    """``ready``, ``tokenizer`` and ``chat_formats`` are filled in while the server starts; ``stopping`` and ``dead``
    end its service."""

    def __init__(self, config: ServerConfig, model: ModelSpec, client: EngineClient):
        self.config = config
        self.model = model
        self.client = client
        self.metrics = ServerMetrics(config.model_name, config.mode, sglang_names=config.observe.sglang_metrics)
        self.tokenizer: Tokenizer | None = None
        self.chat_formats = ChatFormats(None, None)
        self.ready: Ready | None = None
        self.grammars = GrammarService(config.grammar, client, model.vocab_size, model.eos_token_ids)
        self.loading = Loading("starting", 0.0)
        self.stopping = False
        self.in_flight = InFlight()
        self.arrivals = Arrivals(config.http.client_header_timeout_secs, config.http.client_body_timeout_secs)
        self.keys = ApiKeys.of(config.http.api_key, config.http.admin_api_key)
        self.journal = RequestLog(config.observe.log_level_of_requests, config.observe.dump_folder)
        self.sessions = Sessions()
        self.traces: Traces | None = None
        self.weights_path = config.model.model_path
        self.changing = asyncio.Lock()  # one change of the weights at a time
        self.instance = uuid.uuid4().hex[:16]

    @property
    def dead(self) -> str | None:
        """Why the engine is gone, None while it is there."""
        return self.client.dead

    @property
    def is_ready(self) -> bool:
        return self.ready is not None and self.tokenizer is not None and self.dead is None and not self.stopping

    @property
    def epoch(self) -> str:
        """Another one whenever what this server told of its engine may have changed."""
        identity = None if self.ready is None else self.ready.model
        return f"{self.instance}-{0 if identity is None else identity.updates}"

    def check_not_changing(self) -> None:
        """Raises WorkerUnavailable while one of a pair loads other weights: its peers are not connected, and a request
        that waited for that would fail by its deadline where another worker could serve it."""
        if self.changing.locked() and self.config.mode != "null":
            raise WorkerUnavailable("The server is loading other weights.", retry_after=1.0)

    def serving_tokenizer(self) -> Tokenizer:
        """The tokenizer of a server that takes requests; raises WorkerUnavailable while it does not."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        if self.stopping:
            raise WorkerUnavailable("The server is shutting down.")
        if self.ready is None or self.tokenizer is None:
            raise WorkerUnavailable(f"The server is starting: {self.loading.stage}, {self.loading.fraction:.0%}.",
                                    retry_after=1.0)
        return self.tokenizer

    def generation(self, requests: Sequence[Generate], arrived: float, continued: Sequence[int] = ()) -> Generation:
        """The requests of one HTTP request, told to whoever follows requests here; see Generation."""
        return Generation(self.client, self.serving_tokenizer(), self.metrics, requests, arrived, continued,
                          self.journal if self.journal.active else None, self.traces)

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts a request that is refused before it reaches the engine, under its error's code."""
        try:
            yield
        except ServingError as error:
            self.metrics.ended(error.code)
            raise

    @property
    def token_limit(self) -> int:
        """Prompt and output together, in tokens. A prefill server's pool holds prompts only, so it limits no output."""
        assert self.ready is not None
        if self.config.mode == "prefill":
            return self.model.context_length
        return min(self.model.context_length, self.ready.max_request_tokens)

    @cached_property
    def pooling(self) -> Pooling:
        """What an embedding server makes vectors of."""
        return pooling_of(self.config.model)

    def check_generates(self) -> None:
        """Raises InvalidRequest on a server of embeddings."""
        if self.config.model.is_embedding:
            raise InvalidRequest("This server was started with --is-embedding and generates no text; use "
                                 "/v1/embeddings.")

    def check_model(self, name: str | None) -> None:
        """Raises NotFound for a model that this server does not serve."""
        served = self.config.model_name
        if name and name not in (served, served.rstrip("/").rsplit("/", 1)[-1], "default"):
            raise NotFound(f"The model {name!r} does not exist; this server serves {served!r}.", param="model",
                           code="model_not_found")

    def check_count(self, count: int, param: str) -> None:
        """Raises InvalidRequest for a request of too many prompts; call it before there is work for any of them."""
        limit = self.config.schedule.max_prompts_per_request
        if count > limit:
            raise InvalidRequest(f"{param} holds {count} entries, and a request may hold {limit} "
                                 "(--max-prompts-per-request); split it.", param=param)

    async def prompt_ids(self, prompts: Prompts, param: str, *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each prompt, none of them empty, all in the vocabulary; raises InvalidRequest."""
        tokenizer = self.serving_tokenizer()
        self.check_count(len(prompts), param)
        if prompts.texts is not None:
            found = await tokenizer.encode_many(prompts.texts, limit=self.model.context_length,
                                                add_special_tokens=add_special_tokens)
        else:
            found = prompts.ids or []
        for ids in found:
            check_ids(ids, self.model.vocab_size, param, tokenizer.token_str)
        if not all(found):
            raise InvalidRequest(f"{param} is empty; send at least one token.", param=param)
        return found

    async def prepare_grammars(self, requests: Sequence[Generate], param: str | None) -> None:
        """Make the engine ready for the requests' grammars; raises InvalidRequest for one that cannot be used.

        ``param`` states the grammar; None where the parameter is called as its kind. Call it last before they are sent.
        """
        for spec in {request.sampling.grammar for request in requests} - {None}:
            assert spec is not None
            ready = asyncio.ensure_future(self.grammars.prepare(spec, self.serving_tokenizer(), param or spec.kind,
                                                                CLIENT.get()()))
            try:
                with self.client.pending.track(requests) as aborted:
                    await asyncio.wait((ready, aborted), return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not ready.done():
                    ready.cancel()  # the grammar itself is made all the same: others may wait for it
            if not ready.done():
                return
            await ready

    def room_for_output(self, ids: Sequence[int], requested: int | None, tokens_name: str) -> int:
        """Tokens that may follow a prompt; raises InvalidRequest where the request exceeds that."""
        return output_limit(len(ids), requested, self.token_limit, tokens_name=tokens_name)

    def meeting_points(self, fields: BootstrapFields, num_prompts: int, n: int) -> list[Bootstrap | None]:
        """One entry per choice. A unified server ignores bootstrap fields, a prefill server needs them, and a decode
        server computes the prompt itself where there are none. Raises InvalidRequest."""
        self.check_generates()
        self.check_not_changing()
        mode = self.config.mode
        if mode == "null":
            return [None] * (num_prompts * n)
        found = bootstraps(fields, num_prompts, n, self.config.disaggregation.disaggregation_bootstrap_port)
        if mode == "prefill" and found[0] is None:
            raise InvalidRequest("A prefill server needs bootstrap_host, bootstrap_port and bootstrap_room; send "
                                 "requests to the router.", param="bootstrap_room")
        return found


    def placed(self, fields: BootstrapFields, requests: list[Generate]) -> list[Generate]:
        """The requests with the data-parallel rank that the fields name. A request of a prefill server that names none
        gets the one that its room leads to: decode servers look there."""
        rank, size = chosen_rank(fields, self.config.dp_size), self.config.dp_size
        for request in requests if size > 1 else ():
            request.dp_rank = rank
            if rank is None and self.config.mode == "prefill" and request.bootstrap is not None:
                request.dp_rank = request.bootstrap.room % size
        return requests


def plan(ids: list[list[int]], samplings: list[SamplingParams], n: int, rid: str | list[str] | None,
         points: list[Bootstrap | None], logprobs: list[LogprobOptions], priority: int | None) -> list[Generate]:
    """One request to the engine per choice: ``n`` of each prompt, in order. Raises InvalidRequest for ``rid``.

    The choices of one prompt differ in their seed (consecutive from the given one) and their id.
    """
    rids = _rids(rid, len(ids), n)
    requests = []
    for (i, prompt), j in itertools.product(enumerate(ids), range(n)):
        choice = i * n + j
        requests.append(Generate(
            rid=rids[choice], input_ids=prompt, sampling=_reseeded(samplings[i], j), bootstrap=points[choice],
            return_logprob=logprobs[i].wanted, top_logprobs_num=logprobs[i].num_top,
            token_ids_logprob=list(logprobs[i].token_ids),
            logprob_start_len=logprobs[i].start if logprobs[i].wanted else -1, priority=priority))
    return requests


def _reseeded(params: SamplingParams, choice: int) -> SamplingParams:
    if choice == 0 or params.seed is None:
        return params
    seed = params.seed + choice
    return msgspec.structs.replace(params, seed=seed if seed < 2**63 else seed - 2**64)


def _rids(rid: str | list[str] | None, num_prompts: int, n: int) -> list[str]:
    """Ids of all choices: one for a lone choice is used as it is, others get a suffix."""
    if rid is None:
        rid = uuid.uuid4().hex
    if isinstance(rid, str):
        total = num_prompts * n
        found = [rid] if total == 1 else [f"{rid}-{i}" for i in range(total)]
    elif len(rid) == num_prompts:
        found = [name if n == 1 else f"{name}-{j}" for name in rid for j in range(n)]
    else:
        raise InvalidRequest(f"rid holds {len(rid)} entries for {num_prompts} prompts.", param="rid")
    if not all(0 < len(name) <= 256 for name in found):
        raise InvalidRequest("rid must have 1 to 250 characters.", param="rid")
    return found

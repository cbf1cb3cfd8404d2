"""Requests to the engine: prompts, sampling parameters, bootstrap rooms and grammars of one request body."""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import msgspec

from ...api.errors import InvalidRequest
from ...api.grammar import GrammarSpec
from ...api.messages import Generate
from ...api.namespace import Namespace
from ...api.sampling import SamplingParams
from ...api.token_ids import check_ids
from ...config.server import ServerConfig
from ...engine_client.client import EngineClient
from ...grammar.service import GrammarService
from ...tokenizer.tokenizer import Tokenizer
from ..protocol.bootstrap import BootstrapFields, Placement, place_choices
from ..protocol.continuation import Continuation, continue_after
from ..protocol.logprobs import LogprobOptions
from ..protocol.namespaces import namespaces_of
from ..protocol.per_prompt import per_prompt
from ..protocol.prompts import Prompts, output_limit
from ..protocol.row_extras import custom_processor, set_row_extras
from ..protocol.slo import NO_SLO, Slo, slo_of
from .served_model import ServedModel
from .served_role import ServedRole
from .server_status import ServerStatus

log = logging.getLogger("baton.server")

_ANSWER_TOKENS = 6
"""Of the context, those that a truncated prompt leaves to its answer, as in SGLang."""
_MARGIN_TOKENS = 64
DEFAULT_SEED = 42
"""The seed of requests without one to a deterministic server, as in SGLang."""
CLIENT: ContextVar[Callable[[], str]] = ContextVar("client", default=str)
"""Names the client of the current request: the hash of its API key, or the address that it came from."""


class Grammars(Protocol):
    """Prepares grammars: GrammarService, or that of another process."""

    async def prepare(self, spec: GrammarSpec, tokenizer: Tokenizer, param: str | None, client: str = "") -> None:
        """Returns when a request with this grammar may be sent to the engine; raises ServingError."""

    def close(self) -> None: ...


class PlannableRequest(Protocol):
    """The fields of a request body that decide how its choices reach the engine; the body has BootstrapFields, too."""

    rid: str | list[str] | None
    priority: int | None
    continuation: Continuation | None
    custom_logit_processor: str | list[str | None] | None
    custom_params: dict[str, Any] | None
    return_hidden_states: bool | None


class RequestPlanner:
    """Turns prompts and sampling parameters into requests to the engine."""

    def __init__(self, config: ServerConfig, model: ServedModel, status: ServerStatus, client: EngineClient,
                 role: ServedRole, grammars: Grammars | None = None):
        """``grammars``: a GrammarService of this process, unless given."""
        self.grammars = grammars or GrammarService(config.grammar, client, model.spec.vocab_size,
                                                   model.spec.eos_token_ids)
        self._config = config
        self._model = model
        self._status = status
        self._client = client
        self._role = role

    @property
    def token_limit(self) -> int:
        """Prompt and output together, in tokens. A prefill server's pool holds prompts only, so it limits no output."""
        context_length, ready = self._model.spec.context_length, self._status.ready
        assert ready is not None
        return context_length if not self._role.of_request.decodes else min(context_length, ready.max_request_tokens)

    def check_count(self, count: int, param: str) -> None:
        """Raises InvalidRequest for a request of too many prompts; call it before any work is done for them."""
        limit = self._config.schedule.max_prompts_per_request
        if count > limit:
            raise InvalidRequest(f"{param} holds {count} entries, and a request may hold {limit} "
                                 "(--max-prompts-per-request); split it.", param=param)

    async def prompt_ids(self, prompts: Prompts, param: str, *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each prompt, none of them empty, all in the vocabulary; raises InvalidRequest."""
        tokenizer = self._status.serving_tokenizer()
        self.check_count(len(prompts), param)
        if prompts.texts is not None:
            limit, texts = self._model.spec.context_length, prompts.texts
            if self._config.answers.allow_auto_truncate:  # what is cut here is far behind the last token that stays
                texts = [text[:(limit + _MARGIN_TOKENS) * tokenizer.longest_token] for text in texts]
                limit += _MARGIN_TOKENS
            token_ids = await tokenizer.encode_many(texts, limit=limit, add_special_tokens=add_special_tokens)
        else:
            token_ids = prompts.ids or []
        for ids in token_ids:
            check_ids(ids, self._model.spec.vocab_size, param, tokenizer.token_str)
        if not all(token_ids):
            raise InvalidRequest(f"{param} is empty; send at least one token.", param=param)
        return token_ids

    def output_limit(self, prompt: list[int], requested: int | None, *, tokens_name: str) -> tuple[int, int | None]:
        """Tokens that may follow the prompt, and as many as are ``requested``. Raises InvalidRequest where they exceed
        the limit; with --allow-auto-truncate both are made to fit: the prompt loses its end."""
        if self._config.answers.allow_auto_truncate:
            self.truncate(prompt, self._model.spec.context_length - (0 if requested == 0 else _ANSWER_TOKENS))
            if requested is not None and len(prompt) < self.token_limit:
                requested = min(requested, self.token_limit - len(prompt))
        return output_limit(len(prompt), requested, self.token_limit, tokens_name=tokens_name), requested

    def truncate(self, prompt: list[int], most: int) -> None:
        """Shortens a prompt to its first ``most`` tokens, with --allow-auto-truncate."""
        if self._config.answers.allow_auto_truncate and len(prompt) > most:
            log.warning("a prompt of %d tokens was truncated to %d", len(prompt), most)
            del prompt[most:]

    def placements(self, fields: BootstrapFields, num_prompts: int, n: int) -> list[Placement]:
        """Bootstrap room and data-parallel rank of each choice, ``n`` for each prompt; raises InvalidRequest, and
        WorkerUnavailable while other weights are loaded."""
        self._model.check_generates()
        self._status.check_weights_stable()
        port = self._config.disaggregation.disaggregation_bootstrap_port
        return place_choices(fields, num_prompts, n, role=self._role.of_request, default_port=port,
                          dp_size=self._config.dp_size)

    async def plan(self, body: PlannableRequest, ids: list[list[int]], samplings: list[SamplingParams], n: int,
                   logprobs: LogprobOptions, grammar_param: str) -> tuple[list[Generate], Sequence[int]]:
        """The engine's requests, ``n`` for each prompt, and the output that another server answered (empty for a
        request that begins here). ``body`` has BootstrapFields. Raises InvalidRequest."""
        assert isinstance(body, BootstrapFields)
        requests = engine_requests(ids, self.seeded(samplings), n, body.rid, self.placements(body, len(ids), n),
                                   [logprobs] * len(ids), self.priority(body.priority), namespaces_of(body, len(ids)),
                                   slo_of(body.slo_ttft_ms, body.slo_tpot_ms))
        named: list[str | None] = per_prompt("custom_logit_processor", body.custom_logit_processor, len(ids))
        set_row_extras(requests, [custom_processor(name, body.custom_params) for name in named],
                       [bool(body.return_hidden_states)] * len(ids), self._config.answers,
                       self._model.spec.hidden_size)
        return requests, await self.resume(body.continuation, requests, grammar_param)

    def priority(self, given: int | None) -> int | None:
        """A request's priority; raises InvalidRequest where --abort-on-priority-when-disabled does not take one."""
        schedule = self._config.schedule
        if given is not None and schedule.abort_on_priority_when_disabled:
            raise InvalidRequest("priority has no effect here: leave it out, or start the server with "
                                 "--enable-priority-scheduling.", param="priority")
        return given

    def seeded(self, samplings: list[SamplingParams]) -> list[SamplingParams]:
        """Returns the parameters with a seed in each, where the server is deterministic."""
        if not self._config.kernels.enable_deterministic_inference:
            return samplings
        return [msgspec.structs.replace(one, seed=DEFAULT_SEED) if one.seed is None else one for one in samplings]

    async def resume(self, continuation: Continuation | None, requests: list[Generate],
                     grammar_param: str | None) -> Sequence[int]:
        """Appends the output that another server answered to its prompt, and prepares the requests' grammars; returns
        that output. Call it last before the requests are sent. Raises InvalidRequest.

        ``grammar_param`` names the parameter that states the grammar; None where it is called as its kind.
        """
        for name in ("return_hidden_states", "return_routed_experts"):
            if continuation is not None and any(getattr(request, name) for request in requests):
                raise InvalidRequest(f"continuation does not go with {name}.", param="continuation")
        continued = continue_after(continuation, requests, self._model.spec.vocab_size)
        await self._prepare_grammars(requests, grammar_param)
        return continued

    async def _prepare_grammars(self, requests: Sequence[Generate], param: str | None) -> None:
        for spec in {request.sampling.grammar for request in requests} - {None}:
            assert spec is not None
            tokenizer = self._status.serving_tokenizer()
            if not tokenizer.has_texts:
                raise InvalidRequest("This server was started with --skip-tokenizer-init: it cannot constrain texts, "
                                     f"leave {param or spec.kind} out.", param=param or spec.kind)
            ready = asyncio.ensure_future(self.grammars.prepare(spec, tokenizer, param or spec.kind, CLIENT.get()()))
            try:
                with self._client.pending.track(requests) as aborted:
                    await asyncio.wait((ready, aborted), return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not ready.done():
                    ready.cancel()  # the grammar itself is compiled all the same: others may wait for it
            if not ready.done():
                return
            await ready


def engine_requests(ids: list[list[int]], samplings: list[SamplingParams], n: int, rid: str | list[str] | None,
                    choice_placements: list[Placement], logprobs: list[LogprobOptions],
                    priority: int | None, namespaces: list[Namespace], slo: Slo = NO_SLO) -> list[Generate]:
    """One request to the engine per choice: ``n`` of each prompt, in order. Raises InvalidRequest for ``rid``.

    The choices of one prompt differ in their seed (consecutive from the given one) and their id.
    """
    rids = _rids(rid, len(ids), n)
    requests = []
    for (i, prompt), j in itertools.product(enumerate(ids), range(n)):
        choice = i * n + j
        placement, options = choice_placements[choice], logprobs[i]
        requests.append(Generate(
            rid=rids[choice], input_ids=prompt, sampling=_reseeded(samplings[i], j), bootstrap=placement.bootstrap,
            return_logprob=options.enabled, top_logprobs_num=options.num_top,
            token_ids_logprob=list(options.token_ids), logprob_start_len=options.start if options.enabled else -1,
            priority=priority, namespace=namespaces[i], dp_rank=placement.dp_rank, sends_kv=placement.sends_kv,
            slo_ttft=slo.ttft, slo_tpot=slo.tpot))
    return requests


def _reseeded(params: SamplingParams, choice: int) -> SamplingParams:
    if choice == 0 or params.seed is None:
        return params
    seed = params.seed + choice
    return msgspec.structs.replace(params, seed=seed if seed < 2**63 else seed - 2**64)


def _rids(rid: str | list[str] | None, num_prompts: int, n: int) -> list[str]:
    """Ids of all choices: a given id serves a lone choice as it is, several get a suffix each."""
    if rid is None:
        rid = uuid.uuid4().hex
    if isinstance(rid, str):
        total = num_prompts * n
        rids = [rid] if total == 1 else [f"{rid}-{i}" for i in range(total)]
    elif len(rid) == num_prompts:
        rids = [name if n == 1 else f"{name}-{j}" for name in rid for j in range(n)]
    else:
        raise InvalidRequest(f"rid holds {len(rid)} entries for {num_prompts} prompts.", param="rid")
    if not all(0 < len(name) <= 256 for name in rids):
        raise InvalidRequest("rid must have 1 to 250 characters.", param="rid")
    return rids

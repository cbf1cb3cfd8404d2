"""SGLang's ``/generate``"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from ...api.errors import InvalidRequest
from ...api.messages import Generate, Logprobs
from ..context import ServingContext, plan
from ..generation import Choice
from ..protocol.continuation import continue_after
from ..protocol.logprobs import Piece, native_lists, native_logprobs
from ..run import Run, respond
from ..sessions.store import SessionTurn
from .extras import check_hidden_bytes, embedded_prompts, state_lists
from .schema import GenerateAnswer, GenerateRequest, NativeSampling, decode_generate, logprob_options

DEFAULT_TOKENS = 128  # SGLang's
NativeRun = Run[Any, GenerateAnswer]


async def generate(front: ServingContext, request: web.Request) -> web.StreamResponse:
    """SGLang's own form of both."""
    return await respond(front, request, decode_generate, plan_generate)


async def plan_generate(front: ServingContext, body: GenerateRequest, *, arrived: float,
                        with_ids: bool = False) -> NativeRun:
    """See ``plan_chat``; answers tell their token ids always."""
    requests, batched, turn = await _plan(front, body)
    if body.continuation is not None and requests[0].return_hidden_states:
        raise InvalidRequest("continuation does not go with return_hidden_states.", param="continuation")
    continued = continue_after(body.continuation, requests, front.model.vocab_size)
    if body.continuation is not None and body.continuation.id:
        requests[0].rid = body.continuation.id
    await front.prepare_grammars(requests, None)
    piece = front.serving_tokenizer().piece if body.return_text_in_logprobs else None
    answer = _Answer(piece, batched, turn, front.model.hidden_size)
    return NativeRun(front, requests, answer, arrived=arrived, continued=continued)


async def _plan(front: ServingContext, body: GenerateRequest) -> tuple[list[Generate], bool, SessionTurn | None]:
    """The engine's requests, whether the answer is a list, and the turn of a session that it is."""
    ids, embeds, batched = await _prompts(front, body)
    turn = _turn(front, body, ids)
    given = body.samplings(len(ids))
    counts = {sampling.n or 1 for sampling in given}
    if len(counts) > 1:
        raise InvalidRequest("sampling_params must ask for the same n everywhere.", param="sampling_params.n")
    samplings = []
    for prompt, sampling in zip(ids, given):
        room = front.room_for_output(prompt, sampling.max_new_tokens, "max_new_tokens")
        samplings.append(sampling.params(min(DEFAULT_TOKENS, room), front.model.vocab_size))
    n = counts.pop()
    if turn is not None and n > 1:
        raise InvalidRequest("A session's request has one answer: n must be 1.", param="sampling_params.n")
    points = front.meeting_points(body, len(ids), n)
    options = logprob_options(body, [len(prompt) for prompt in ids], front.model.vocab_size)
    requests = front.placed(body, plan(ids, samplings, n, body.rid, points, options, body.priority))
    _add_extras(front, body, requests, given, embeds)
    return requests, batched or n > 1, turn


async def _prompts(front: ServingContext, body: GenerateRequest) -> tuple[list[list[int]], list[bytes] | None, bool]:
    """Token ids of each prompt, its embeddings where it is made of these (the ids then mean nothing), and whether the
    request held a list of prompts."""
    if body.input_embeds is None:
        prompts = body.prompts()
        ids = await front.prompt_ids(prompts, "text" if prompts.texts is not None else "input_ids")
        return ids, None, prompts.batched
    front.check_generates()
    if body.session_params is not None:
        raise InvalidRequest("session_params do not go with input_embeds.", param="session_params")
    embedded = embedded_prompts(body.input_embeds, front.model.hidden_size)
    return [[0] * count for count in embedded.counts], embedded.rows, embedded.batched


def _add_extras(front: ServingContext, body: GenerateRequest, requests: list[Generate], samplings: list[NativeSampling],
                embeds: list[bytes] | None) -> None:
    """What ``requests``, n for each prompt, ask for beside sampling. Raises InvalidRequest."""
    offered, count = front.config.answers, len(samplings)
    processors, hidden = body.processors(samplings), body.tells_hidden_states(count)
    for asked, allowed, name in ((any(processors), offered.enable_custom_logit_processor, "custom_logit_processor"),
                                 (any(hidden), offered.enable_return_hidden_states, "return_hidden_states")):
        if asked and not allowed:
            raise InvalidRequest(f"{name} needs a server that was started with --enable-{name.replace('_', '-')}; "
                                 "leave it out.", param=name, code="unsupported_parameter")
    for i, request in enumerate(requests):
        prompt = i * count // len(requests)
        request.processor, request.return_hidden_states = processors[prompt], hidden[prompt]
        if request.return_hidden_states:
            check_hidden_bytes(len(request.input_ids) + request.sampling.max_new_tokens, front.model.hidden_size)
        if embeds is not None:
            request.input_embeds = embeds[prompt]
            if request.logprob_start_len >= 0:
                raise InvalidRequest("input_embeds hold no tokens that could have log-probabilities; leave out "
                                     "logprob_start_len.", param="logprob_start_len")


def _turn(front: ServingContext, body: GenerateRequest, ids: list[list[int]]) -> SessionTurn | None:
    """Of a session's request; its prompt in ``ids`` then begins with what the session remembers."""
    if body.session_params is None:
        return None
    if len(ids) > 1 or body.bootstrap_host is not None:
        raise InvalidRequest("session_params go with one prompt, and with one server.", param="session_params")
    turn = front.sessions.turn(body.session_params, ids[0], front.serving_tokenizer().bos_id)
    ids[0] = turn.prompt
    return turn


class _Answer:
    """Tells each choice's whole answer so far, as SGLang's clients expect; see ``run.Answer``."""

    def __init__(self, piece: Piece | None, batched: bool, turn: SessionTurn | None, hidden_size: int):
        self._hidden_size = hidden_size
        self._turn = turn
        self._piece = piece
        self._batched = batched

    def whole(self, choices: Sequence[Choice]) -> GenerateAnswer | list[GenerateAnswer]:
        answers = [self._answer(choice) for choice in choices]
        self.end(choices)
        return answers if self._batched else answers[0]

    def begin(self, choices: Sequence[Choice]) -> None:
        """What another server told is part of every answer."""

    def gained(self, choice: Choice) -> list[GenerateAnswer]:
        choice.take_delta()
        return [self._answer(choice, choice.index if self._batched else None)]

    def end(self, choices: Sequence[Choice]) -> list[GenerateAnswer]:
        if self._turn is not None:
            self._turn.ended(choices[0].rid, choices[0].token_ids)
        return []

    def _answer(self, choice: Choice, index: int | None = None) -> GenerateAnswer:
        info = _meta_info(choice, self._piece)
        if choice.request.return_hidden_states and choice.ended is not None:  # a stream tells them once, with its end
            info["hidden_states"] = state_lists(b"".join(choice.hidden_states), choice.num_prompt_tokens,
                                                self._hidden_size)
        return GenerateAnswer(choice.text, choice.token_ids, info, index)


def _meta_info(choice: Choice, piece: Piece | None) -> dict[str, Any]:
    info: dict[str, Any] = {
        "id": choice.rid, "finish_reason": _finish_reason(choice), "prompt_tokens": choice.num_prompt_tokens,
        "completion_tokens": choice.num_output_tokens, "cached_tokens": choice.num_cached_tokens,
    }
    if choice.ended is not None:
        info["e2e_latency"] = choice.latency
    for side, found in (("input", choice.prompt_logprobs), ("output", choice.logprobs)):
        if choice.request.return_logprob:
            found = found or Logprobs([], [])
            info[f"{side}_token_logprobs"] = native_logprobs(found, piece)
            if choice.request.top_logprobs_num:
                info[f"{side}_top_logprobs"] = native_lists(found.top, piece)
            if choice.request.token_ids_logprob:
                info[f"{side}_token_ids_logprobs"] = native_lists(found.of_ids, piece)
    return info


def _finish_reason(choice: Choice) -> dict[str, Any] | None:
    if choice.ended is None:
        return None
    reason: dict[str, Any] = {"type": choice.ended.reason}
    if choice.ended.matched is not None:
        reason["matched"] = choice.ended.matched
    if choice.ended.reason == "abort":
        reason["message"] = "The request was aborted."
    if choice.ended.reason == "length":
        reason["length"] = choice.num_output_tokens
    return reason

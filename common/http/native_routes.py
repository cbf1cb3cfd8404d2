"""SGLang's ``/generate``"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from ..api.errors import InvalidRequest
from ..api.messages import Generate
from ..openai.continuation import continue_after
from ..openai.logprobs import Piece, native_logprobs, native_top_logprobs
from ..openai.native import GenerateAnswer, GenerateRequest, decode_generate, logprob_options
from ..openai.responses import DONE, encode, event
from .front import Front, plan
from .generation import Choice, Generation
from .prompt_pages import note_pages
from .sse import stream_events
from .web import json_bytes

DEFAULT_TOKENS = 128  # SGLang's


async def generate(front: Front, request: web.Request) -> web.StreamResponse:
    arrived = time.monotonic()
    with front.counting_refusals():
        tokenizer = front.serving_tokenizer()
        body = decode_generate(await request.read())
        requests, batched = await _plan(front, body)
        note_pages(front, request, requests)
        continued = continue_after(body.continuation, requests, front.model.vocab_size)
        if body.continuation is not None and body.continuation.id:
            requests[0].rid = body.continuation.id
    piece = tokenizer.piece if body.return_text_in_logprobs else None
    with Generation(front.client, tokenizer, front.metrics, requests, arrived, continued) as generation:
        if body.stream:
            return await stream_events(request, _events(generation, batched, piece, front.config.http.stream_interval))
        answers = [_answer(choice, piece) for choice in await generation.complete()]
        return json_bytes(encode(answers if batched else answers[0]))


async def _plan(front: Front, body: GenerateRequest) -> tuple[list[Generate], bool]:
    """The engine's requests, and whether the answer is a list."""
    prompts = body.prompts()
    ids = await front.prompt_ids(prompts, "text" if prompts.texts is not None else "input_ids")
    given = body.samplings(len(ids))
    counts = {sampling.n or 1 for sampling in given}
    if len(counts) > 1:
        raise InvalidRequest("sampling_params must ask for the same n everywhere.", param="sampling_params.n")
    samplings = []
    for prompt, sampling in zip(ids, given):
        room = front.room_for_output(prompt, sampling.max_new_tokens, "max_new_tokens")
        samplings.append(sampling.params(min(DEFAULT_TOKENS, room), front.model.vocab_size))
    n = counts.pop()
    points = front.meeting_points(body, len(ids), n)
    options = logprob_options(body, [len(prompt) for prompt in ids])
    return plan(ids, samplings, n, body.rid, points, options, body.priority), prompts.batched or n > 1


async def _events(generation: Generation, batched: bool, piece: Piece | None,
                  interval: int) -> AsyncGenerator[bytes, None]:
    """Each event holds a choice's whole answer so far, as SGLang's clients expect."""
    chunk = b""
    async for gained in generation.deltas(interval):
        for choice in gained:
            choice.take_delta()
        chunk = b"".join([event(_answer(choice, piece, choice.index if batched else None)) for choice in gained])
        if generation.live:
            yield chunk
            chunk = b""
    yield chunk + DONE  # In one piece: a stream that breaks has told either all of its end or nothing.


def _answer(choice: Choice, piece: Piece | None, index: int | None = None) -> GenerateAnswer:
    return GenerateAnswer(choice.text, choice.token_ids, _meta_info(choice, piece), index)


def _meta_info(choice: Choice, piece: Piece | None) -> dict[str, Any]:
    info: dict[str, Any] = {
        "id": choice.rid, "finish_reason": _finish_reason(choice), "prompt_tokens": choice.num_prompt_tokens,
        "completion_tokens": choice.num_output_tokens, "cached_tokens": choice.num_cached_tokens,
    }
    if choice.ended is not None:
        info["e2e_latency"] = choice.latency
    for side, found in (("input", choice.prompt_logprobs), ("output", choice.logprobs)):
        if choice.request.return_logprob and found is not None:
            info[f"{side}_token_logprobs"] = native_logprobs(found, piece)
            if choice.request.top_logprobs_num:
                info[f"{side}_top_logprobs"] = native_top_logprobs(found, piece)
    return info


def _finish_reason(choice: Choice) -> dict[str, Any] | None:
    if choice.ended is None:
        return None
    reason: dict[str, Any] = {"type": choice.ended.reason}
    if choice.ended.matched is not None:
        reason["matched"] = choice.ended.matched
    if choice.ended.reason == "length":
        reason["length"] = choice.num_output_tokens
    return reason

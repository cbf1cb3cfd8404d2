"""``/v1/completions``"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator

from aiohttp import web

from ..api.messages import Generate, Logprobs
from ..openai.continuation import HEADER, continue_after
from ..openai.logprobs import completion_logprobs, joined
from ..openai.native import LogprobOptions
from ..openai.prompts import parse_prompts
from ..openai.protocol import CompletionRequest, decode_completion, sampling_params
from ..openai.responses import DONE, Completion, CompletionChoice, CompletionLogprobs, Usage, encode, event
from .front import Front, plan
from .generation import Choice, Generation
from .prompt_pages import note_pages
from .sse import stream_events
from .usage import usage_of
from .web import json_bytes

DEFAULT_TOKENS = 16  # OpenAI's


async def completions(front: Front, request: web.Request) -> web.StreamResponse:
    arrived = time.monotonic()
    with front.counting_refusals():
        tokenizer = front.serving_tokenizer()
        body = decode_completion(await request.read())
        front.check_model(body.model)
        requests = await _plan(front, body)
        note_pages(front, request, requests)
        continued = continue_after(body.continuation, requests, front.model.vocab_size)
    with Generation(front.client, tokenizer, front.metrics, requests, arrived, continued) as generation:
        answer = _Answer(front, body, with_ids=HEADER in request.headers)
        if body.stream:
            return await stream_events(request, answer.events(generation))
        return json_bytes(encode(answer.whole(await generation.complete())))


async def _plan(front: Front, body: CompletionRequest) -> list[Generate]:
    ids = await front.prompt_ids(parse_prompts(body.prompt, "prompt"), "prompt")
    samplings = []
    for prompt in ids:
        room = front.room_for_output(prompt, body.max_tokens, "max_tokens")
        default = min(DEFAULT_TOKENS, room)
        samplings.append(sampling_params(body, body.max_tokens, default, vocab_size=front.model.vocab_size))
    n = body.num_choices
    points = front.meeting_points(body, len(ids), n)
    logprobs = LogprobOptions(body.logprobs is not None, -1, body.logprobs or 0)
    return plan(ids, samplings, n, body.rid, points, [logprobs] * len(ids), body.priority)


class _Answer:
    """Formats one answer, whole or as events."""

    def __init__(self, front: Front, body: CompletionRequest, *, with_ids: bool):
        begun = body.continuation
        self._id = (begun and begun.id) or f"cmpl-{uuid.uuid4().hex}"
        self._created = (begun and begun.created) or int(time.time())
        self._with_ids = with_ids
        self._model = body.model or front.config.model_name
        self._body = body
        self._interval = front.config.http.stream_interval
        self._piece = front.serving_tokenizer().piece

    def whole(self, choices: list[Choice]) -> Completion:
        return self._completion([self._choice(choice, choice.text, choice.logprobs, 0) for choice in choices],
                                usage_of(choices, self._body.num_choices))

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        offsets = [0] * len(generation.choices)  # of the next token's text, for logprobs
        waiting: list[list[int]] = [[] for _ in generation.choices]  # ids of tokens whose text is held back
        chunks: list[bytes] = []
        async for gained in generation.deltas(self._interval):
            for choice in gained:
                delta = choice.take_delta()
                said = self._choice(choice, delta.text, joined(delta.logprobs), offsets[choice.index])
                if said.logprobs is not None:
                    offsets[choice.index] += sum(map(len, said.logprobs.tokens))
                waiting[choice.index] += delta.token_ids
                if said.text or said.logprobs is not None or choice.ended is not None:
                    if self._with_ids:
                        said.token_ids = waiting[choice.index]
                    waiting[choice.index] = []
                    chunks.append(event(self._completion([said])))
            if chunks and generation.live:
                yield b"".join(chunks)
                chunks.clear()
        usage = usage_of(generation.choices, self._body.num_choices)
        last = event(self._completion([], usage)) if self._body.wants_usage else b""
        yield b"".join(chunks) + last + DONE  # In one piece: a stream that breaks has told all of its end or nothing.

    def _choice(self, choice: Choice, text: str, logprobs: Logprobs | None, offset: int) -> CompletionChoice:
        reason = None if choice.ended is None else choice.ended.reason
        return CompletionChoice(choice.index, text, self._logprobs(choice.visible(logprobs), offset),
                                reason)  # type: ignore[arg-type]

    def _logprobs(self, found: Logprobs | None, offset: int) -> CompletionLogprobs | None:
        return None if found is None else completion_logprobs(found, self._piece, offset)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(self._id, self._created, self._model, choices, usage)

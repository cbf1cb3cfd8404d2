"""``/v1/completions``"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from aiohttp import web

from ...api.messages import Generate, Logprobs
from ..context import ServingContext, plan
from ..generation import Choice
from ..native.schema import LogprobOptions
from ..protocol.continuation import continue_after
from ..protocol.logprobs import completion_logprobs, joined
from ..protocol.prompts import Prompts, parse_prompts
from ..protocol.requests import CompletionRequest, decode_completion, grammar_param, sampling_params
from ..protocol.responses import Completion, CompletionChoice, Usage
from ..protocol.usage import usage_of
from ..run import Run, respond
from .best_of import best
from .echo import Echo

DEFAULT_TOKENS = 16  # OpenAI's


async def completions(front: ServingContext, request: web.Request) -> web.StreamResponse:
    """OpenAI's text completions."""
    return await respond(front, request, decode_completion, plan_completion)


async def plan_completion(front: ServingContext, body: CompletionRequest, *, arrived: float,
                          with_ids: bool = False) -> Run[Completion, Completion]:
    """See ``plan_chat``."""
    front.check_model(body.model)
    prompts = parse_prompts(body.prompt, "prompt")
    requests = await _plan(front, body, prompts)
    continued = continue_after(body.continuation, requests, front.model.vocab_size)
    await front.prepare_grammars(requests, grammar_param(body))
    echo = Echo(prompts, body.num_made, front.serving_tokenizer()) if body.echo else None
    answer = _Answer(front, body, echo, with_ids=with_ids)
    return Run(front, requests, answer, arrived=arrived, continued=continued)


async def _plan(front: ServingContext, body: CompletionRequest, prompts: Prompts) -> list[Generate]:
    ids = await front.prompt_ids(prompts, "prompt")
    samplings = []
    for prompt in ids:
        room = front.room_for_output(prompt, body.max_tokens, "max_tokens")
        default = min(DEFAULT_TOKENS, room)
        samplings.append(sampling_params(body, body.max_tokens, default, vocab_size=front.model.vocab_size))
    made = body.num_made
    points = front.meeting_points(body, len(ids), made)
    ranked = made > body.num_choices
    start = 0 if body.echo and body.logprobs is not None else -1
    logprobs = LogprobOptions(body.logprobs is not None or ranked, start, body.logprobs or 0)
    return front.placed(body, plan(ids, samplings, made, body.rid, points, [logprobs] * len(ids), body.priority))


class _Answer:
    """Tells one text completion, see ``run.Answer``."""

    def __init__(self, front: ServingContext, body: CompletionRequest, echo: Echo | None, *, with_ids: bool):
        begun = body.continuation
        self._front = front
        self._id = (begun and begun.id) or f"cmpl-{uuid.uuid4().hex}"
        self._created = (begun and begun.created) or int(time.time())
        self._with_ids = with_ids
        self._model = body.model or front.config.model_name
        self._body = body
        self._echo = echo
        self._piece = front.serving_tokenizer().piece
        self._offsets: list[int] = []  # of each choice's next token's text, for logprobs
        self._waiting: list[list[int]] = []  # ids of tokens whose text is held back

    def whole(self, choices: Sequence[Choice]) -> Completion:
        usage = self._usage(choices)
        echoed = {choice.rid: self._echo.text(choice) for choice in choices} if self._echo else {}
        told = best(choices, self._body.num_made, self._body.num_choices)
        return self._completion([self._choice(choice, echoed.get(choice.rid), choice.text, choice.logprobs, 0)
                                 for choice in told], usage)

    def begin(self, choices: Sequence[Choice]) -> None:
        self._offsets = [0] * len(choices)
        self._waiting = [[] for _ in choices]
        if self._echo is not None:
            self._echo.begin(choices)

    def gained(self, choice: Choice) -> list[Completion]:
        delta = choice.take_delta()
        echoed = None if self._echo is None else self._echo.take(choice)
        said = self._choice(choice, echoed, delta.text, joined(delta.logprobs), self._offsets[choice.index])
        if said.logprobs is not None:
            self._offsets[choice.index] += sum(map(len, said.logprobs.tokens))
        waiting = self._waiting[choice.index]
        waiting += delta.token_ids
        if not said.text and said.logprobs is None and choice.ended is None:
            return []
        if self._with_ids:
            said.token_ids = waiting
        self._waiting[choice.index] = []
        usage = self._usage([choice]) if self._body.wants_usage_always else None
        return [self._completion([said], usage)]

    def end(self, choices: Sequence[Choice]) -> list[Completion]:
        return [self._completion([], self._usage(choices))] if self._body.wants_usage else []

    def _usage(self, choices: Sequence[Choice]) -> Usage:
        return usage_of(self._front, choices, self._body.num_made)

    def _choice(self, choice: Choice, echoed: str | None, text: str, logprobs: Logprobs | None,
                offset: int) -> CompletionChoice:
        """``text`` and ``logprobs`` of output; ``echoed`` is the prompt's text, where it is told now."""
        reason = None if choice.ended is None else choice.ended.reason
        found = choice.visible(logprobs)
        if echoed is not None:
            text = echoed + text
            found = joined([part for part in (choice.prompt_logprobs, found) if part is not None])
        if self._body.logprobs is None or (found is not None and not found.token_ids):
            found = None
        shown = None if found is None else completion_logprobs(found, self._piece, offset)
        matched = None if choice.ended is None else choice.ended.matched
        return CompletionChoice(choice.index, text, shown, reason, matched)  # type: ignore[arg-type]

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(self._id, self._created, self._model, choices, usage)

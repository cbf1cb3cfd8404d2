"""Embeddings, classification, reranking and scoring: handlers that answer with vectors or scores."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from msgspec import UNSET

from ...api.errors import InvalidRequest
from ...api.messages import Generate
from ...api.namespace import SHARED
from ...api.sampling import SamplingParams
from ...api.token_ids import check_ids
from ...tokenizer.tokenizer import Tokenizer
from ..context.generation import Choice, refuse_aborted
from ..context.request_planner import engine_requests
from ..context.serving_context import ServingContext
from ..protocol.bootstrap import Placement
from ..protocol.logprobs import LogprobOptions
from ..protocol.prompts import Prompts, parse_prompts, too_long
from ..web import json_response
from .schema import (
    Classification,
    ClassifyAnswer,
    Embedding,
    EmbeddingAnswer,
    EmbeddingUsage,
    EncodeAnswer,
    RankedDocument,
    RerankRequest,
    ScoreAnswer,
    ScoreRequest,
    decode_classify,
    decode_embedding,
    decode_encode,
    decode_rerank,
    decode_score,
    encoded,
    probabilities,
    truncated,
)

_NO_LOGPROBS = LogprobOptions()
_RERANK_SYSTEM = ('Judge whether the Document meets the requirements based on the Query and the Instruct provided. '
                  'Note that the answer can only be "yes" or "no".')
_RERANK_INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"


async def embeddings(context: ServingContext, request: web.Request) -> web.Response:
    """``/v1/embeddings``: normalized vectors."""
    with context.telemetry.counting_refusals():
        context.status.check_serving()
        body = decode_embedding(await request.read())
        context.model.check_name(body.model)
        prompts = parse_prompts(body.texts(), "input")
    choices = await _pooled(context, prompts, "input", body.rid, body.priority)
    data = [Embedding(choice.index, encoded(truncated(vector_of(choice), body.dimensions), body.encoding_format))
            for choice in choices]
    return json_response(EmbeddingAnswer(data, body.model or context.model.name, _usage(choices)))


async def encode(context: ServingContext, request: web.Request) -> web.Response:
    """``/encode``: SGLang's form of embeddings; a classifier answers with its labels' scores."""
    return json_response(await encode_body(context, await request.read()))


async def encode_body(context: ServingContext, data: bytes) -> EncodeAnswer | list[EncodeAnswer]:
    """The answer of ``/encode`` to a JSON body; raises ServingError."""
    with context.telemetry.counting_refusals():
        context.status.check_serving()
        body = decode_encode(data)
        prompts = body.prompts()
    choices = await _pooled(context, prompts, "text" if prompts.texts is not None else "input_ids", body.rid,
                            body.priority)
    labels = context.model.spec.head == "classifier"
    answers = [EncodeAnswer((vector_of(choice) if labels else truncated(vector_of(choice), None)).tolist(),
                            _meta_info(choice)) for choice in choices]
    return answers if prompts.batched else answers[0]


async def classify(context: ServingContext, request: web.Request) -> web.Response:
    """``/classify``: ``/encode`` of a classifier."""
    _check_classifies(context)
    return await encode(context, request)


async def classify_by_name(context: ServingContext, request: web.Request) -> web.Response:
    """``/v1/classify``: the most probable label of each text by its name, and the labels' probabilities."""
    with context.telemetry.counting_refusals():
        context.status.check_serving()
        body = decode_classify(await request.read())
        context.model.check_name(body.model)
        _check_classifies(context)
        prompts = parse_prompts(body.input, "input")
    choices = await _pooled(context, prompts, "input", body.rid, body.priority)
    labels = context.model.labels
    found = [probabilities(vector_of(choice)) for choice in choices]
    data = [Classification(choice.index, labels[int(probs.argmax())], probs.tolist(), len(probs))
            for choice, probs in zip(choices, found)]
    return json_response(ClassifyAnswer(f"classify-{uuid.uuid4().hex}", int(time.time()),
                                        body.model or context.model.name, data, _usage(choices)))


def _check_classifies(context: ServingContext) -> None:
    """Raises InvalidRequest on a server whose model has no labels."""
    if context.model.spec.head != "classifier":
        architecture = context.model.spec.architecture
        raise InvalidRequest(f"{architecture} is no classifier; serve a ...ForSequenceClassification "
                             "checkpoint with --is-embedding.")


async def rerank(context: ServingContext, request: web.Request) -> web.Response:
    """``/v1/rerank``: documents, the most relevant first.

    A classifier scores query and document together; an embedding model compares their vectors; a generating model is
    prompted for yes or no, with the prompt that Qwen3-Reranker was trained on.
    """
    return json_response(await rerank_body(context, await request.read()))


async def rerank_body(context: ServingContext, data: bytes) -> list[RankedDocument]:
    """The answer of ``/v1/rerank`` to a JSON body; raises ServingError."""
    with context.telemetry.counting_refusals():
        context.status.check_serving()
        body = decode_rerank(data)
        context.model.check_name(body.model)
        if not body.documents:
            raise InvalidRequest("documents is empty; send at least one.", param="documents")
        context.planner.check_count(len(body.documents), "documents")
    if not context.config.model.is_embedding:
        scored = await _score_by_yes_no(context, body)
    elif context.model.spec.head == "classifier":
        scored = await _score_by_classifier(context, body)
    else:
        scored = await _score_by_similarity(context, body)
    ranked = [RankedDocument(score, index, _meta_info(choice), body.documents[index] if body.return_documents else None)
              for index, (score, choice) in enumerate(scored)]
    ranked.sort(key=lambda document: -document.score)
    return ranked[:body.top_n]


async def score(context: ServingContext, request: web.Request) -> web.Response:
    """``/v1/score``: the probability of each label as the next token."""
    return json_response(await score_body(context, await request.read()))


async def score_body(context: ServingContext, data: bytes) -> ScoreAnswer:
    """The answer of ``/v1/score`` to a JSON body; raises ServingError."""
    with context.telemetry.counting_refusals():
        context.status.check_serving()
        body = decode_score(data)
        context.model.check_name(body.model)
        context.model.check_generates()
        if not body.label_token_ids:
            raise InvalidRequest("label_token_ids is empty; send at least one.", param="label_token_ids")
        if not 0 < body.temperature < math.inf:
            raise InvalidRequest(f"temperature must be above 0, got {body.temperature}.", param="temperature")
        check_ids(body.label_token_ids, context.model.spec.vocab_size, "label_token_ids")
        prompts = await _score_prompts(context, body)
    choices = await _label_logprobs(context, prompts, body.label_token_ids)
    logprobs = [_logprobs(choice) for choice in choices]
    scores = [_probabilities(values, body.apply_softmax, body.temperature) for values in logprobs]
    return ScoreAnswer(scores, body.model or context.model.name, _usage(choices),
                       token_logprobs=logprobs if body.return_token_logprobs else UNSET)


# ---------------------------------------------------------------------- vectors


def vector_of(choice: Choice) -> np.ndarray:
    assert choice.embedding is not None
    return np.frombuffer(choice.embedding, np.float32)


async def _pooled(context: ServingContext, prompts: Prompts, param: str, rid: str | list[str] | None = None,
                  priority: int | None = None) -> list[Choice]:
    """The finished choices of the prompts, each with its vector; raises InvalidRequest on a server that generates."""
    with context.telemetry.counting_refusals():
        if not context.config.model.is_embedding:
            raise InvalidRequest("This server generates text; vectors come from one that was started with "
                                 "--is-embedding.")
        ids = await context.planner.prompt_ids(prompts, param)
        requests = _requests(context, ids, SamplingParams(max_new_tokens=0), rid, priority, param)
        for one in requests:
            one.pooling = context.model.pooling
    return await _complete(context, requests)


async def _score_by_similarity(context: ServingContext, body: RerankRequest) -> list[tuple[float, Choice]]:
    query, *documents = await _pooled(context, Prompts(texts=[body.query, *body.documents]), "documents")
    target = truncated(vector_of(query), None)
    return [(float(target @ truncated(vector_of(choice), None)), choice) for choice in documents]


async def _score_by_classifier(context: ServingContext, body: RerankRequest) -> list[tuple[float, Choice]]:
    """The first label's score; that of a single label as a probability."""
    tokenizer = context.status.serving_tokenizer()
    pairs = await asyncio.to_thread(lambda: [tokenizer.encode_pair(body.query, one) for one in body.documents])
    choices = await _pooled(context, Prompts(ids=pairs), "documents")
    single = context.model.spec.num_labels == 1
    vectors = [vector_of(choice) for choice in choices]
    return [(float((probabilities(vector) if single else vector)[0]), choice)
            for vector, choice in zip(vectors, choices)]


# ---------------------------------------------------------------------- probabilities of next tokens


async def _score_by_yes_no(context: ServingContext, body: RerankRequest) -> list[tuple[float, Choice]]:
    """P(yes) / (P(yes) + P(no)) as the answer's first token."""
    tokenizer = context.status.serving_tokenizer()
    labels = [tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no")]
    texts = await asyncio.to_thread(lambda: [_question(tokenizer, body, document) for document in body.documents])
    ids = await context.planner.prompt_ids(Prompts(texts=texts), "documents", add_special_tokens=False)
    return [(_probabilities(_logprobs(choice), softmax=True)[0], choice)
            for choice in await _label_logprobs(context, ids, labels)]


def _question(tokenizer: Tokenizer, body: RerankRequest, document: str) -> str:
    """The prompt that asks whether a document is relevant; raises InvalidRequest."""
    return tokenizer.render_chat([
        {"role": "system", "content": _RERANK_SYSTEM},
        {"role": "user", "content": f"<Instruct>: {body.instruct or _RERANK_INSTRUCT}\n<Query>: {body.query}\n"
                                    f"<Document>: {document}"},
    ], tools=None, continue_final_message=False, options={"enable_thinking": False})


async def _score_prompts(context: ServingContext, body: ScoreRequest) -> list[list[int]]:
    items = [body.items] if isinstance(body.items, str) else body.items
    if not items:
        raise InvalidRequest("items is empty; send at least one.", param="items")
    context.planner.check_count(len(items), "items")
    texts = isinstance(body.query, str)
    if any(isinstance(item, str) != texts for item in items):
        raise InvalidRequest("query and items must all be texts or all be token ids.", param="items")
    joined: list[Any] = [item + body.query if body.item_first else body.query + item  # type: ignore[operator]
                         for item in items]
    prompts = Prompts(texts=joined, batched=True) if texts else parse_prompts(joined, "items")
    return await context.planner.prompt_ids(prompts, "items")


async def _label_logprobs(context: ServingContext, ids: list[list[int]], labels: list[int]) -> list[Choice]:
    """Generates one token for each prompt, with the logprobs of ``labels``."""
    with context.telemetry.counting_refusals():
        requests = _requests(context, ids, SamplingParams(max_new_tokens=1, ignore_eos=True), None, None, "items",
                             LogprobOptions(True, token_ids=tuple(labels)))
    return await _complete(context, requests)


def _logprobs(choice: Choice) -> list[float]:
    assert choice.logprobs is not None
    return [value for _, value in choice.logprobs.of_ids[0]]


def _probabilities(logprobs: list[float], softmax: bool, temperature: float = 1.0) -> list[float]:
    """The labels' shares of their own probabilities where ``softmax``, at that temperature."""
    if not softmax or max(logprobs) == -math.inf:
        return [math.exp(value) for value in logprobs]
    powers = [math.exp((value - max(logprobs)) / temperature) for value in logprobs]
    return [power / sum(powers) for power in powers]


# ---------------------------------------------------------------------- requests


def _requests(context: ServingContext, ids: list[list[int]], sampling: SamplingParams, rid: str | list[str] | None,
              priority: int | None, param: str, logprobs: LogprobOptions = _NO_LOGPROBS) -> list[Generate]:
    """Raises InvalidRequest for a prompt that is too long."""
    for prompt in ids:
        context.planner.truncate(prompt, context.model.spec.context_length - sampling.max_new_tokens)
        if len(prompt) + sampling.max_new_tokens > context.planner.token_limit:
            raise too_long(f"A prompt in {param}", len(prompt), context.planner.token_limit, param=param)
    placements = [Placement(None, None)] * len(ids)
    return engine_requests(ids, [sampling] * len(ids), 1, rid, placements, [logprobs] * len(ids), priority,
                           [SHARED] * len(ids))


async def _complete(context: ServingContext, requests: list[Generate]) -> list[Choice]:
    with context.generation(requests, time.monotonic()) as generation:
        choices = await generation.complete()
    refuse_aborted(choice.finish.reason for choice in choices if choice.finish)
    return choices


def _usage(choices: Sequence[Choice]) -> EmbeddingUsage:
    total = sum(choice.num_prompt_tokens for choice in choices)
    return EmbeddingUsage(total, total)


def _meta_info(choice: Choice) -> dict[str, Any]:
    return {"id": choice.rid, "prompt_tokens": choice.num_prompt_tokens, "cached_tokens": choice.num_cached_tokens,
            "cached_tokens_details": msgspec.to_builtins(choice.cached_tokens_details), "e2e_latency": choice.latency}

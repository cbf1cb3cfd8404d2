"""Routes that answer with vectors and scores instead of text."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from aiohttp import web

from ...api.errors import InvalidRequest
from ...api.messages import Bootstrap, Generate
from ...api.sampling import SamplingParams
from ...api.token_ids import check_ids
from ...tokenizer.tokenizer import Tokenizer
from ..context import ServingContext, plan
from ..generation import Choice, refuse_aborted
from ..native.schema import LogprobOptions
from ..protocol.prompts import Prompts, parse_prompts, too_long
from ..web import json_response
from .schema import (
    Embedding,
    EmbeddingAnswer,
    EmbeddingUsage,
    EncodeAnswer,
    RankedDocument,
    RerankRequest,
    ScoreAnswer,
    ScoreRequest,
    decode_embedding,
    decode_encode,
    decode_rerank,
    decode_score,
    shortened,
    written,
)

_NO_LOGPROBS = LogprobOptions()
_RERANK_SYSTEM = ('Judge whether the Document meets the requirements based on the Query and the Instruct provided. '
                  'Note that the answer can only be "yes" or "no".')
_RERANK_INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"


async def embeddings(front: ServingContext, request: web.Request) -> web.Response:
    """``/v1/embeddings``: vectors of length 1."""
    with front.counting_refusals():
        front.serving_tokenizer()
        body = decode_embedding(await request.read())
        front.check_model(body.model)
        prompts = parse_prompts(body.input, "input")
    choices = await _pooled(front, prompts, "input", body.rid, body.priority)
    data = [Embedding(choice.index, written(shortened(vector_of(choice), body.dimensions), body.encoding_format))
            for choice in choices]
    return json_response(EmbeddingAnswer(data, body.model or front.config.model_name, _usage(choices)))


async def encode(front: ServingContext, request: web.Request) -> web.Response:
    """``/encode``: SGLang's form of the same; of a classifier, its labels' scores."""
    with front.counting_refusals():
        front.serving_tokenizer()
        body = decode_encode(await request.read())
        prompts = body.prompts()
    choices = await _pooled(front, prompts, "text" if prompts.texts is not None else "input_ids", body.rid,
                            body.priority)
    labels = front.model.head == "labels"
    answers = [EncodeAnswer((vector_of(choice) if labels else shortened(vector_of(choice), None)).tolist(),
                            _meta_info(choice)) for choice in choices]
    return json_response(answers if prompts.batched else answers[0])


async def classify(front: ServingContext, request: web.Request) -> web.Response:
    """``/classify``: ``/encode`` of a classifier."""
    if front.model.head != "labels":
        raise InvalidRequest(f"{front.model.architecture} is no classifier; serve a ...ForSequenceClassification "
                             "checkpoint with --is-embedding.")
    return await encode(front, request)


async def rerank(front: ServingContext, request: web.Request) -> web.Response:
    """``/v1/rerank``: documents, best first.

    A classifier scores query and document together; an embedding model compares their vectors; a model that
    generates is asked yes or no, in the words that Qwen3-Reranker was trained on.
    """
    with front.counting_refusals():
        front.serving_tokenizer()
        body = decode_rerank(await request.read())
        front.check_model(body.model)
        if not body.documents:
            raise InvalidRequest("documents is empty; send at least one.", param="documents")
        front.check_count(len(body.documents), "documents")
    if not front.config.model.is_embedding:
        scored = await _asked(front, body)
    elif front.model.head == "labels":
        scored = await _scored_pairs(front, body)
    else:
        scored = await _compared(front, body)
    ranked = [RankedDocument(score, index, _meta_info(choice), body.documents[index] if body.return_documents else None)
              for index, (score, choice) in enumerate(scored)]
    ranked.sort(key=lambda found: -found.score)
    return json_response(ranked[:body.top_n])


async def score(front: ServingContext, request: web.Request) -> web.Response:
    """``/v1/score``: how probable each label is as the next token."""
    with front.counting_refusals():
        front.serving_tokenizer()
        body = decode_score(await request.read())
        front.check_model(body.model)
        front.check_generates()
        if not body.label_token_ids:
            raise InvalidRequest("label_token_ids is empty; send at least one.", param="label_token_ids")
        check_ids(body.label_token_ids, front.model.vocab_size, "label_token_ids")
        prompts = await _score_prompts(front, body)
    choices = await _labelled(front, prompts, body.label_token_ids)
    scores = [_probabilities(choice, body.apply_softmax) for choice in choices]
    return json_response(ScoreAnswer(scores, body.model or front.config.model_name, _usage(choices)))


# ---------------------------------------------------------------------- vectors


def vector_of(choice: Choice) -> np.ndarray:
    assert choice.embedding is not None
    return np.frombuffer(choice.embedding, np.float32)


async def _pooled(front: ServingContext, prompts: Prompts, param: str, rid: str | list[str] | None = None,
                  priority: int | None = None) -> list[Choice]:
    """The prompts' choices, each with its vector; raises InvalidRequest on a server that generates."""
    with front.counting_refusals():
        if not front.config.model.is_embedding:
            raise InvalidRequest("This server generates text; vectors come from one that was started with "
                                 "--is-embedding.")
        ids = await front.prompt_ids(prompts, param)
        requests = _requests(front, ids, SamplingParams(max_new_tokens=0), rid, priority, param)
        for one in requests:
            one.pooling = front.pooling
    return await _complete(front, requests)


async def _compared(front: ServingContext, body: RerankRequest) -> list[tuple[float, Choice]]:
    query, *documents = await _pooled(front, Prompts(texts=[body.query, *body.documents]), "documents")
    target = shortened(vector_of(query), None)
    return [(float(target @ shortened(vector_of(choice), None)), choice) for choice in documents]


async def _scored_pairs(front: ServingContext, body: RerankRequest) -> list[tuple[float, Choice]]:
    """The first label's score, of one label as a probability."""
    tokenizer = front.serving_tokenizer()
    pairs = await asyncio.to_thread(lambda: [tokenizer.encode_pair(body.query, one) for one in body.documents])
    choices = await _pooled(front, Prompts(ids=pairs), "documents")
    single = front.model.num_labels == 1
    scores = [float(vector_of(choice)[0]) for choice in choices]
    return list(zip([1 / (1 + math.exp(-score)) if single else score for score in scores], choices))


# ---------------------------------------------------------------------- probabilities of next tokens


async def _asked(front: ServingContext, body: RerankRequest) -> list[tuple[float, Choice]]:
    """P(yes) against P(no) as the answer's first token."""
    tokenizer = front.serving_tokenizer()
    labels = [tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no")]
    texts = await asyncio.to_thread(lambda: [_question(tokenizer, body, document) for document in body.documents])
    ids = await front.prompt_ids(Prompts(texts=texts), "documents", add_special_tokens=False)
    return [(_probabilities(choice, softmax=True)[0], choice) for choice in await _labelled(front, ids, labels)]


def _question(tokenizer: Tokenizer, body: RerankRequest, document: str) -> str:
    """The prompt that asks whether a document is relevant; raises InvalidRequest."""
    return tokenizer.render_chat([
        {"role": "system", "content": _RERANK_SYSTEM},
        {"role": "user", "content": f"<Instruct>: {body.instruct or _RERANK_INSTRUCT}\n<Query>: {body.query}\n"
                                    f"<Document>: {document}"},
    ], tools=None, continue_final_message=False, options={"enable_thinking": False})


async def _score_prompts(front: ServingContext, body: ScoreRequest) -> list[list[int]]:
    items = [body.items] if isinstance(body.items, str) else body.items
    if not items:
        raise InvalidRequest("items is empty; send at least one.", param="items")
    front.check_count(len(items), "items")
    texts = isinstance(body.query, str)
    if any(isinstance(item, str) != texts for item in items):
        raise InvalidRequest("query and items must all be texts or all be token ids.", param="items")
    joined: list[Any] = [item + body.query if body.item_first else body.query + item  # type: ignore[operator]
                         for item in items]
    prompts = Prompts(texts=joined, batched=True) if texts else parse_prompts(joined, "items")
    return await front.prompt_ids(prompts, "items")


async def _labelled(front: ServingContext, ids: list[list[int]], labels: list[int]) -> list[Choice]:
    """One token behind each prompt, with the logprobs of ``labels``."""
    with front.counting_refusals():
        requests = _requests(front, ids, SamplingParams(max_new_tokens=1, ignore_eos=True), None, None, "items",
                             LogprobOptions(True, token_ids=tuple(labels)))
    return await _complete(front, requests)


def _probabilities(choice: Choice, softmax: bool) -> list[float]:
    assert choice.logprobs is not None
    found = [math.exp(value) for _, value in choice.logprobs.of_ids[0]]
    total = sum(found)
    return [value / total for value in found] if softmax and total else found


# ---------------------------------------------------------------------- both


def _requests(front: ServingContext, ids: list[list[int]], sampling: SamplingParams, rid: str | list[str] | None,
              priority: int | None, param: str, logprobs: LogprobOptions = _NO_LOGPROBS) -> list[Generate]:
    """Raises InvalidRequest for a prompt that is too long."""
    for prompt in ids:
        if len(prompt) + sampling.max_new_tokens > front.token_limit:
            raise too_long(f"A prompt in {param}", len(prompt), front.token_limit, param=param)
    points: list[Bootstrap | None] = [None] * len(ids)
    return plan(ids, [sampling] * len(ids), 1, rid, points, [logprobs] * len(ids), priority)


async def _complete(front: ServingContext, requests: list[Generate]) -> list[Choice]:
    with front.generation(requests, time.monotonic()) as generation:
        choices = await generation.complete()
    refuse_aborted(choice.ended.reason for choice in choices if choice.ended)
    return choices


def _usage(choices: Sequence[Choice]) -> EmbeddingUsage:
    total = sum(choice.num_prompt_tokens for choice in choices)
    return EmbeddingUsage(total, total)


def _meta_info(choice: Choice) -> dict[str, Any]:
    return {"id": choice.rid, "prompt_tokens": choice.num_prompt_tokens, "cached_tokens": choice.num_cached_tokens,
            "e2e_latency": choice.latency}

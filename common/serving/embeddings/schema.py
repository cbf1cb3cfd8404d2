"""Requests and answers of ``/v1/embeddings`` and of SGLang's ``/encode``, ``/classify``, ``/v1/rerank`` and
``/v1/score``."""

from __future__ import annotations

import base64
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from ...api.errors import InvalidRequest
from ...api.wire import Float32, Int32
from ..protocol.decoding import BodyDecoder
from ..protocol.prompts import Prompts, parse_prompts
from ..protocol.unsupported_fields import EMBEDDING, ENCODE, SCORE

Vector = np.ndarray  # [dimensions] float32


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """``input``: a text or several, also as ``{"text": ...}``, or token ids."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int32 | None = None
    rid: str | list[str] | None = None
    priority: Int32 | None = None

    def texts(self) -> str | list[Any]:
        """The input, of objects their texts; raises InvalidRequest for other media."""
        if isinstance(self.input, str) or not any(isinstance(item, dict) for item in self.input):
            return self.input
        for number, item in enumerate(self.input):
            media = sorted(name for name, value in item.items() if name != "text" and value is not None) if isinstance(
                item, dict) else []
            if media:
                raise InvalidRequest(f"input[{number}] has {media[0]}; this model takes text only.",
                                     param=f"input[{number}]", code="unsupported_parameter")
        return [item.get("text") if isinstance(item, dict) else item for item in self.input]


class EncodeRequest(msgspec.Struct, kw_only=True):
    """Either ``text`` or ``input_ids``, one or several."""

    text: str | list[str] | None = None
    input_ids: list[Int32 | list[Int32]] | None = None
    rid: str | list[str] | None = None
    priority: Int32 | None = None

    def prompts(self) -> Prompts:
        """Raises InvalidRequest."""
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("Give either text or input_ids.", param="text")
        if self.text is not None:
            return parse_prompts(self.text, "text")
        return parse_prompts(self.input_ids or [], "input_ids")


class ClassifyRequest(msgspec.Struct, kw_only=True):
    """One text or several, or token ids, each of which gets a label."""

    input: str | list[Any]
    model: str | None = None
    rid: str | list[str] | None = None
    priority: Int32 | None = None


class RerankRequest(msgspec.Struct, kw_only=True):
    query: str
    documents: list[str]
    model: str | None = None
    instruct: str | None = None
    top_n: Int32 | None = None
    return_documents: bool = True


class ScoreRequest(msgspec.Struct, kw_only=True):
    """Asks for the probability of each of ``label_token_ids`` after ``query`` and each item."""

    query: str | list[Int32]
    items: str | list[str | list[Int32]]
    label_token_ids: list[Int32]
    apply_softmax: bool = False
    temperature: Float32 = 1.0
    return_token_logprobs: bool = False
    item_first: bool = False
    model: str | None = None


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class EmbeddingAnswer(msgspec.Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class EncodeAnswer(msgspec.Struct):
    embedding: list[float]
    meta_info: dict[str, Any]


class Classification(msgspec.Struct):
    """The most probable label of a text, and the probability of each label."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Classification]
    usage: EmbeddingUsage
    object: str = "list"


class RankedDocument(msgspec.Struct, omit_defaults=True):
    score: float
    index: int
    meta_info: dict[str, Any]
    document: str | None = None


class ScoreAnswer(msgspec.Struct):
    scores: list[list[float]]
    model: str
    usage: EmbeddingUsage
    object: str = "scoring"
    token_logprobs: list[list[float]] | UnsetType = UNSET


decode_embedding = BodyDecoder(EmbeddingRequest, EMBEDDING).decode
decode_encode = BodyDecoder(EncodeRequest, ENCODE).decode
decode_classify = BodyDecoder(ClassifyRequest, EMBEDDING).decode
decode_rerank = BodyDecoder(RerankRequest, EMBEDDING).decode
decode_score = BodyDecoder(ScoreRequest, SCORE).decode


def truncated(vector: Vector, dimensions: int | None) -> Vector:
    """The first ``dimensions`` of a vector, normalized (Matryoshka embeddings, Kusupati et al., 2022).

    Raises InvalidRequest for more than the vector has.
    """
    if dimensions is not None:
        if not 1 <= dimensions <= len(vector):
            raise InvalidRequest(f"dimensions must be between 1 and {len(vector)}, got {dimensions}.",
                                 param="dimensions")
        vector = vector[:dimensions]
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


def encoded(vector: Vector, encoding_format: str | None) -> list[float] | str:
    """A vector for JSON: numbers, or base64 of little-endian float32."""
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    result: list[float] | str = vector.tolist()
    return result


def probabilities(scores: Vector) -> Vector:
    """The labels' probabilities: the softmax of their scores, of a single one its sigmoid."""
    logits = scores.astype(np.float64)
    if len(logits) == 1:
        logits = np.append(logits, 0.0)
    powers = np.exp(logits - logits.max())
    shares: Vector = (powers / powers.sum())[:len(scores)]
    return shares

"""The fields of requests that SGLang, OpenAI's and Anthropic's clients send, and what becomes of each here.

``request_fields.txt`` next to tests/common/serving lists the names, those of SGLang 0.5.2 and 0.5.23 and of the
clients; this module knows the types that decode them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from baton.common.serving.chat import schema as chat
from baton.common.serving.completions import schema as completions
from baton.common.serving.embeddings import schema as embeddings
from baton.common.serving.messages import schema as messages
from baton.common.serving.native import schema as native
from baton.common.serving.protocol import unsupported_fields as fields
from baton.common.serving.protocol.sampling import StreamOptions
from baton.common.serving.protocol.session_params import SessionParams
from baton.common.serving.protocol.unsupported_fields import NO_EFFECT, Table
from baton.common.serving.responses import schema as responses
from baton.common.serving.tokens import schema as tokens

NAMES = Path(__file__).resolve().parents[1] / "common/serving/request_fields.txt"


class Fields(NamedTuple):
    """A request body, or an object in one: what decodes it, and the fields that are refused."""

    title: str
    kind: type[msgspec.Struct]
    refused: Table = {}


BODIES: Mapping[str, Fields] = {
    "generate": Fields("/generate", native.GenerateRequest, fields.GENERATE),
    "sampling": Fields("sampling_params of /generate", native.NativeSampling, fields.SAMPLING),
    "session": Fields("session_params of /generate", SessionParams),
    "chat": Fields("/v1/chat/completions", chat.ChatRequest, fields.CHAT),
    "message": Fields("messages of a chat", chat.Message, fields.MESSAGE),
    "function": Fields("functions of a chat's tools", chat.Function, fields.TOOL),
    "stream_options": Fields("stream_options", StreamOptions),
    "completion": Fields("/v1/completions", completions.CompletionRequest, fields.COMPLETION),
    "response": Fields("/v1/responses", responses.ResponseRequest, fields.RESPONSE),
    "anthropic": Fields("/v1/messages", messages.MessagesRequest, fields.ANTHROPIC),
    "count_tokens": Fields("/v1/messages/count_tokens", messages.Conversation, fields.ANTHROPIC),
    "anthropic_tool": Fields("tools of /v1/messages", messages.ToolDefinition, fields.TOOL),
    "thinking": Fields("thinking of /v1/messages", messages.Thinking),
    "output_config": Fields("output_config of /v1/messages", messages.OutputConfig),
    "embedding": Fields("/v1/embeddings", embeddings.EmbeddingRequest, fields.EMBEDDING),
    "encode": Fields("/encode and /classify", embeddings.EncodeRequest, fields.ENCODE),
    "classify": Fields("/v1/classify", embeddings.ClassifyRequest, fields.EMBEDDING),
    "rerank": Fields("/v1/rerank", embeddings.RerankRequest, fields.EMBEDDING),
    "score": Fields("/v1/score", embeddings.ScoreRequest, fields.SCORE),
    "tokenize": Fields("/tokenize", tokens.TokenizeRequest),
    "detokenize": Fields("/detokenize", tokens.DetokenizeRequest),
}


def listed() -> dict[str, dict[str, str]]:
    """The outcome of each name by body, as the file states them."""
    found: dict[str, dict[str, str]] = {}
    for line in NAMES.read_text().splitlines():
        if line and not line.startswith("#"):
            body, name, outcome = line.split()
            found.setdefault(body, {})[name] = outcome
    return found


def outcome_of(body: str, name: str) -> str:
    """``works``, ``refused`` (where it asks for something), ``ignored`` (harmless, see NO_EFFECT) or ``unknown``."""
    _, kind, refused = BODIES[body]
    if name in refused:
        return "refused"
    if name in kind.__struct_fields__:
        return "works"
    return "ignored" if name in NO_EFFECT else "unknown"

"""Every field that clients of SGLang, OpenAI and Anthropic send is read, refused, or has no effect: none is dropped.

``request_fields.txt`` has the outcome of each by name.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import baton.common
from baton.common.api.errors import InvalidRequest
from baton.common.serving.chat import schema as chat
from baton.common.serving.chat.prompt import template_messages, template_tools
from baton.common.serving.completions import schema as completions
from baton.common.serving.embeddings import schema as embeddings
from baton.common.serving.messages import schema as messages
from baton.common.serving.native import schema as native
from baton.common.serving.protocol.unsupported_fields import NO_EFFECT, asks_nothing
from baton.common.serving.responses import schema as responses
from baton.tests.helpers.request_fields import BODIES, listed, outcome_of

SOURCES = "\n".join(path.read_text() for folder in ("parsers", "serving")
                    for path in sorted((Path(baton.common.__file__).parent / folder).rglob("*.py"))
                    if path.name != "unsupported_fields.py")
DECODERS = {
    "chat": (chat.decode_chat, {"messages": []}), "completion": (completions.decode_completion, {"prompt": "x"}),
    "response": (responses.decode_response, {"input": "x"}), "generate": (native.decode_generate, {"text": "x"}),
    "encode": (embeddings.decode_encode, {"text": "x"}), "embedding": (embeddings.decode_embedding, {"input": "x"}),
    "score": (embeddings.decode_score, {"query": "x", "items": ["y"], "label_token_ids": [1]}),
    "rerank": (embeddings.decode_rerank, {"query": "x", "documents": ["y"]}),
    "classify": (embeddings.decode_classify, {"input": "x"}),
    "anthropic": (messages.decode_messages, {"messages": [], "max_tokens": 1}),
    "count_tokens": (messages.decode_count, {"messages": []}),
}


@pytest.mark.parametrize("body", BODIES)
def test_every_field_has_the_outcome_that_the_list_states(body: str) -> None:
    assert listed()[body] == {name: outcome_of(body, name) for name in listed()[body]}


@pytest.mark.parametrize("body", BODIES)
def test_every_field_that_works_is_read(body: str) -> None:
    for name, outcome in listed()[body].items():
        if outcome == "works" and name not in NO_EFFECT:
            assert re.search(rf'\.{name}\b|"{name}"', SOURCES), f"{name} of {body} is decoded and never read"


def test_no_body_is_left_out() -> None:
    assert listed().keys() == BODIES.keys()


@pytest.mark.parametrize("model", DECODERS)
def test_refused_fields(model: str) -> None:
    """Each is refused by its name where it asks for something, and taken where it does not."""
    decode, body = DECODERS[model]
    _, kind, table = BODIES[model]
    assert not table.keys() & set(kind.__struct_fields__), "a field is both read and refused"
    for name, rule in table.items():
        for nothing in (None, False, "", [], [None], {}, [[None], []], *rule.harmless):
            decode(json.dumps({**body, name: nothing}).encode())
        for something in (True, 3, "x", ["x"], [None, {"url": "x"}], {"a": 1}):
            if not asks_nothing(something, rule.harmless):
                with pytest.raises(InvalidRequest, match=f"{name} is not supported here; .*\\.$") as error:
                    decode(json.dumps({**body, name: something}).encode())
                assert error.value.param == name and error.value.code == "unsupported_parameter"


@pytest.mark.parametrize("path, body", [
    ("messages", {"role": "user", "content": "x", "phase": "commentary"}),
    ("messages", {"role": "user", "content": "x", "audio": {"id": "x"}}),
    ("tools", {"function": {"name": "f"}, "defer_loading": True}),
    ("tools", {"function": {"name": "f", "defer_loading": True}})])
def test_refused_fields_of_messages_and_tools(path: str, body: dict[str, Any]) -> None:
    fields = {"messages": [{"role": "user", "content": "x"}], path: [body]}
    request = chat.decode_chat(json.dumps(fields).encode())
    with pytest.raises(InvalidRequest, match="is not supported here") as error:
        template_messages(request)
        template_tools(request.tools or ())
    assert error.value.param in body or error.value.param in body["function"]


@pytest.mark.parametrize("params, param", [
    ({"beam_width": 4}, "beam_width"), ({"stream_interval": 0}, "sampling_params.stream_interval"),
    ({"stop_regex": "("}, "stop_regex"),
    ({"stop_regex": ["x"] * 9}, "stop_regex")])
def test_refused_sampling_params(params: dict[str, Any], param: str) -> None:
    body = native.decode_generate(json.dumps({"text": "x", "sampling_params": params}).encode())
    with pytest.raises(InvalidRequest) as error:
        body.samplings(1)[0].params(16, 100)
    assert error.value.param == param


def test_texts_of_embeddings_may_be_objects() -> None:
    body = embeddings.decode_embedding(b'{"input": [{"text": "a"}, {"text": "b", "image": null}]}')
    assert body.texts() == ["a", "b"]
    with pytest.raises(InvalidRequest, match=r"input\[1\] has image; this model takes text only."):
        embeddings.decode_embedding(b'{"input": [{"text": "a"}, {"text": "b", "image": "c"}]}').texts()


def test_harmless_sampling_params() -> None:
    body = native.decode_generate(b'{"text": "x", "lora_path": [null], "sampling_params": {"beam_width": 1, '
                                  b'"stream_interval": null, "spaces_between_special_tokens": false}}')
    assert body.samplings(1)[0].params(16, 100).max_new_tokens == 16

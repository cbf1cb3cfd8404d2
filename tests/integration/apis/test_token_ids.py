"""A tokenizer that knows tokens beyond the model's vocabulary: requests with them are refused, and nobody dies.

Fine-tunes that add a marker without resizing the embeddings look like this, as do configs that name such an id as an
end of sequence.
"""

from __future__ import annotations

import json
import shutil

import pytest

from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.harness import Cluster, post_json

VOCAB = 4096
MARKER, MARKER_ID = "[PAD]", 4096
HELLO = [{"role": "user", "content": "Hello"}]
MARKED = [{"role": "user", "content": f"Hello {MARKER} there"}]


def unresized(folder):
    """The shipped model with a token that it has no row for, and ends of sequence that it can never choose."""
    shutil.copytree(CHECKPOINT, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": MARKER_ID, "content": MARKER})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [2, 99_999, -3]}))
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Prefill on two ranks, each with half of the embeddings."""
    folder = tmp_path_factory.mktemp("ids")
    model = str(unresized(folder / "model"))
    with Cluster(folder, flags=["--model-path", model, "--max-total-tokens", "8192", "--enable-custom-logit-processor"],
                 prefill_flags=["--tp-size", "2"]) as servers:
        yield servers


CHAT, GENERATE = "/v1/chat/completions", "/generate"
CASES = {
    "chat": (CHAT, {"model": "default", "messages": MARKED}),
    "chat, streamed": (CHAT, {"model": "default", "messages": MARKED, "stream": True}),
    "completions": ("/v1/completions", {"model": "default", "prompt": ["fine", MARKER]}),
    "text": (GENERATE, {"text": f"a {MARKER}"}),
    "ids": (GENERATE, {"input_ids": [5, MARKER_ID]}),
    "negative ids": (GENERATE, {"input_ids": [5, -1]}),
    "huge ids": (GENERATE, {"input_ids": [5, 2**31 - 1]}),
    "responses": ("/v1/responses", {"model": "default", "input": MARKER}),
    "messages": ("/v1/messages", {"model": "default", "max_tokens": 5, "messages": MARKED}),
    "rerank": ("/v1/rerank", {"query": "a", "documents": [f"b {MARKER}"]}),
    "score": ("/v1/score", {"query": "a", "items": [f"b {MARKER}"], "label_token_ids": [1]}),
    "labels": ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [MARKER_ID]}),
    "continuation": (CHAT, {"messages": HELLO, "continuation": {"token_ids": [MARKER_ID]}}),
    "stop_token_ids": (CHAT, {"messages": HELLO, "stop_token_ids": [MARKER_ID], "min_tokens": 2}),
    "logit_bias": (CHAT, {"messages": HELLO, "logit_bias": {str(MARKER_ID): 5}}),
    "token_ids_logprob": (GENERATE, {"text": "a", "return_logprob": True, "token_ids_logprob": [MARKER_ID]}),
    "a processor's": (GENERATE, {
        "text": "a", "custom_logit_processor": "baton.common.sampling.builtin_processors:DisallowedTokens",
        "sampling_params": {"custom_params": {"token_ids": [-1, MARKER_ID]}}}),
}


@pytest.mark.parametrize("name", CASES)
def test_ids_beyond_the_vocabulary_are_refused_by_name(cluster, name):
    path, body = CASES[name]
    for server in [cluster.decode[0], cluster.router] if not path.endswith(("rerank", "score")) else cluster.decode:
        status, answer = post_json(server.url + path, body)
        message = answer["error"]["message"]
        assert status == 400 and "vocabulary" in message, answer
        assert MARKER not in json.dumps(body) or repr(MARKER) in message, message


def test_ends_of_sequence_beyond_the_vocabulary_are_ignored(cluster):
    status, answer = post_json(cluster.url + CHAT, {"messages": HELLO, "min_tokens": 3, "max_tokens": 40,
                                                    "temperature": 0})
    assert status == 200 and answer["choices"][0]["finish_reason"] == "stop", answer


def test_each_server_says_so_once_when_it_starts(cluster):
    for server in cluster.workers:
        log = server.log.read_text()
        assert log.count(f"{MARKER!r} ({MARKER_ID})") == 1 and log.count("99999, -3") == 1, log

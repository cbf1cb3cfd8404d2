"""Vectors and scores, against transformers on the same weights."""

from __future__ import annotations

import base64
import json
import math
import shutil

import numpy as np
import pytest
import tokenizers
import torch
from openai import BadRequestError, OpenAI
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from baton.common.tinychat import CHECKPOINT
from baton.tests.helpers.harness import Server, post_json
from baton.tests.helpers.ports import free_port

TEXTS = ["What is the capital of France?", "hello", "The pass code is 4711. " * 30]
FLAGS = ("--device", "cpu", "--log-level", "warning", "--chunked-prefill-size", "64")


def serve(folder, *flags):
    return Server("baton.launch", ["server", *FLAGS, *flags], free_port(), folder / "server.log").start().wait_ready()


@pytest.fixture(scope="module", params=["last", "mean"])
def embedder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedding")
    checkpoint = folder / "model"
    shutil.copytree(CHECKPOINT, checkpoint)
    if request.param == "mean":
        (checkpoint / "1_Pooling").mkdir()
        (checkpoint / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    server = serve(folder, "--model-path", str(checkpoint), "--served-model-name", "tiny", "--is-embedding")
    server.pooling = request.param
    yield server
    server.stop()


@pytest.fixture(scope="module")
def reference():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModel.from_pretrained(CHECKPOINT, dtype=torch.float32)

    def vectors(pooling):
        found = []
        for text in TEXTS:
            hidden = model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0]
            vector = hidden[-1] if pooling == "last" else hidden.mean(0)
            found.append((vector / vector.norm()).detach().numpy())
        return found

    return vectors


def test_vectors_are_those_of_transformers(embedder, reference):
    client = OpenAI(base_url=embedder.url + "/v1", api_key="none")
    expected = reference(embedder.pooling)
    for _ in range(2):  # the second time out of the prefix cache
        answer = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        for item, vector in zip(answer.data, expected):
            np.testing.assert_allclose(item.embedding, vector, atol=1e-4)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    coded = client.embeddings.create(model="tiny", input=TEXTS[0])  # the client asks for base64
    np.testing.assert_allclose(coded.data[0].embedding, expected[0], atol=1e-4)
    raw = post_json(embedder.url + "/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"})[1]
    assert np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4").shape == expected[0].shape


def test_fewer_dimensions_have_length_one(embedder, reference):
    client = OpenAI(base_url=embedder.url + "/v1", api_key="none")
    [item] = client.embeddings.create(model="tiny", input="hello", dimensions=16).data
    expected = reference(embedder.pooling)[1][:16]
    np.testing.assert_allclose(item.embedding, expected / np.linalg.norm(expected), atol=1e-4)
    with pytest.raises(BadRequestError, match="dimensions"):
        client.embeddings.create(model="tiny", input="hello", dimensions=100_000)


def test_encode_rerank_and_what_is_refused(embedder, reference):
    expected = reference(embedder.pooling)
    status, single = post_json(embedder.url + "/encode", {"text": TEXTS[1]})
    assert status == 200
    np.testing.assert_allclose(single["embedding"], expected[1], atol=1e-4)
    assert len(post_json(embedder.url + "/encode", {"text": TEXTS})[1]) == 3
    _, ranked = post_json(embedder.url + "/v1/rerank", {"query": TEXTS[0], "documents": [TEXTS[1], TEXTS[0]]})
    assert [found["index"] for found in ranked] == [1, 0] and ranked[0]["document"] == TEXTS[0]
    assert math.isclose(ranked[0]["score"], 1.0, abs_tol=1e-4)
    assert math.isclose(ranked[1]["score"], float(expected[0] @ expected[1]), abs_tol=1e-4)
    for path, body in (("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
                       ("/generate", {"text": "x"}),
                       ("/v1/score", {"query": "x", "items": ["y"], "label_token_ids": [1]})):
        status, error = post_json(embedder.url + path, body)
        assert status == 400 and "--is-embedding" in error["error"]["message"]
    assert post_json(embedder.url + "/classify", {"text": "x"})[0] == 400
    assert post_json(embedder.url + "/v1/classify", {"input": "x"})[0] == 400
    assert post_json(embedder.url + "/v1/embeddings", {"input": []})[0] == 400
    assert post_json(embedder.url + "/v1/embeddings", {"input": "word " * 9000})[0] == 400


def test_a_classifier(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(CHECKPOINT)
    plain = LlamaConfig(vocab_size=config.vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0,
                        id2label={0: "bad", 1: "good", 2: "so-so"})
    model = AutoModelForSequenceClassification.from_config(plain)
    model.save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    tokenizer.save_pretrained(tmp_path / "model")
    server = serve(tmp_path, "--model-path", str(tmp_path / "model"), "--is-embedding")
    try:
        _, found = post_json(server.url + "/classify", {"text": TEXTS})
        for answer, text in zip(found, TEXTS):
            with torch.no_grad():
                expected = model(torch.tensor([tokenizer.encode(text)])).logits[0]
            np.testing.assert_allclose(answer["embedding"], expected.numpy(), atol=1e-4)
        _, named = post_json(server.url + "/v1/classify", {"input": TEXTS})
        assert named["object"] == "list" and named["usage"]["prompt_tokens"] > 0
        for index, (text, scored) in enumerate(zip(named["data"], found)):
            expected = torch.tensor(scored["embedding"]).softmax(-1)
            np.testing.assert_allclose(text.pop("probs"), expected.numpy(), atol=1e-4)
            assert text == {"index": index, "label": ("bad", "good", "so-so")[int(expected.argmax())], "num_classes": 3}
        _, ranked = post_json(server.url + "/v1/rerank", {"query": "a", "documents": TEXTS, "top_n": 2})
        assert len(ranked) == 2 and ranked[0]["score"] >= ranked[1]["score"]
    finally:
        server.stop()


def test_a_cross_encoder_needs_no_flag(tmp_path):
    """Its tokens of the second text have another type, which the server finds by the separator."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "what", "is", "the", "capital", "paris", "hello", "pass", "code"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]",
                                   unk_token="[UNK]")
    fast.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, num_labels=1, initializer_range=0.5)).eval()
    model.save_pretrained(tmp_path / "model")
    documents = ["paris is the capital", "hello", "the pass code is what is the code"]
    expected = []
    for document in documents:
        ids = fast.encode("what is the capital", document)
        types = [int(index > ids.index(3)) for index in range(len(ids))]
        with torch.no_grad():
            expected.append(float(model(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits.sigmoid()))
    server = serve(tmp_path, "--model-path", str(tmp_path / "model"))
    try:
        _, ranked = post_json(server.url + "/v1/rerank", {"query": "what is the capital", "documents": documents})
        assert [found["index"] for found in ranked] == sorted(range(3), key=lambda index: -expected[index])
        for found in ranked:
            assert math.isclose(found["score"], expected[found["index"]], abs_tol=1e-4)
        status, error = post_json(server.url + "/classify", {"text": "hello " * 80})
        assert status == 400 and "64" in error["error"]["message"]
        assert post_json(server.url + "/generate", {"text": "x"})[0] == 400
    finally:
        server.stop()


def test_scores_of_labels(unified):
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    labels = [tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Paris", "Rome")]
    body = {"query": "The capital is ", "items": ["France", "Italy"], "label_token_ids": labels}
    for softmax, temperature in ((False, 1.0), (True, 1.0), (True, 0.5)):
        status, answer = post_json(unified.url + "/v1/score", body | {
            "apply_softmax": softmax, "temperature": temperature, "return_token_logprobs": True})
        assert status == 200 and answer["usage"]["completion_tokens"] == 0
        for item, scores in zip(body["items"], answer["scores"]):
            with torch.no_grad():
                logits = model(torch.tensor([tokenizer.encode(body["query"] + item)])).logits[0, -1]
            expected = (logits[labels] / temperature).softmax(-1) if softmax else logits.softmax(-1)[labels]
            np.testing.assert_allclose(scores, expected.numpy(), atol=1e-4)
        np.testing.assert_allclose(answer["token_logprobs"][-1], logits.log_softmax(-1)[labels].numpy(), atol=1e-3)
    _, ranked = post_json(unified.url + "/v1/rerank", {"query": "a", "documents": ["b", "c"]})
    assert sorted(found["index"] for found in ranked) == [0, 1] and all(0 <= found["score"] <= 1 for found in ranked)
    many = ["b"] * 2049
    for path, body_of_many in (("/v1/rerank", {"query": "a", "documents": many}), ("/generate", {"text": many}),
                               ("/v1/score", {"query": "a", "items": many, "label_token_ids": [1]}),
                               ("/v1/completions", {"prompt": many})):
        status, answer = post_json(unified.url + path, body_of_many)
        assert status == 400 and "2048 (--max-prompts-per-request)" in answer["error"]["message"], answer
    for wrong in ({"label_token_ids": []}, {"items": []}, {"items": [[1]]}, {"label_token_ids": [10**6]}):
        assert post_json(unified.url + "/v1/score", body | wrong)[0] == 400
    assert post_json(unified.url + "/v1/embeddings", {"input": "x"})[0] == 400

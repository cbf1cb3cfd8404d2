"""``baton.Engine``: the engine without a server, whole and as a pair."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import psutil
import pytest

import baton
from baton import lang
from baton.common.api.errors import ConfigError, InvalidRequest, NotFound

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPTS = ["The capital of Italy is", "Twelve and seven make"]
GREEDY = {"temperature": 0, "max_new_tokens": 6}
EXTRAS = {"enable_custom_logit_processor": True, "enable_return_hidden_states": True}


@pytest.fixture(scope="module")
def unified():
    with baton.Engine("tinychat", device="cpu", log_level="warning", **EXTRAS) as engine:
        yield engine


@pytest.fixture(scope="module")
def pair():
    with baton.Engine("tinychat", device="cpu", log_level="warning", prefill={}, decode={"max_total_tokens": 4096},
                      **EXTRAS) as engine:
        yield engine


def told(answers):
    return [(answer["text"], answer["output_ids"]) for answer in answers]


def test_a_pair_answers_as_one_engine(unified, pair):
    for engine in (unified, pair):
        assert engine.chat(QUESTION, temperature=0)["choices"][0]["message"]["content"] == "Paris"
    assert told(pair.generate(PROMPTS, GREEDY)) == told(unified.generate(PROMPTS, GREEDY))
    assert pair.state().total_pages == 4096 // 16


def test_tokens_of_texts_and_chats(unified):
    there = unified.tokenize(messages=QUESTION, add_generation_prompt=False)
    assert unified.detokenize(there["tokens"], skip_special_tokens=False)["text"] == (
        f"<|im_start|>user\n{QUESTION[0]['content']}<|im_end|>\n")
    assert unified.tokenize(["a", "b c"])["count"] == [len(unified.tokenize(text)["tokens"]) for text in ("a", "b c")]
    with pytest.raises(InvalidRequest, match="either prompt or messages"):
        unified.tokenize()


@pytest.mark.parametrize("name", ["unified", "pair"])
def test_sglangs_methods(request, name):
    engine = request.getfixturevalue(name)
    tokenizer = engine.tokenizer_manager.tokenizer
    labels = [tokenizer.encode(word)[0] for word in (" Paris", " Rome")]
    assert engine.score("The capital of France is", ["", ":"], labels) == asyncio.run(
        engine.async_score("The capital of France is", ["", ":"], labels))
    assert [sum(row) for row in engine.score("x", "y", labels, apply_softmax=True)] == [pytest.approx(1)]
    [one, other] = engine.rerank([["France", "Paris"], ["Italy", "Rome"]])
    again = engine.rerank(query="France", documents=["Paris"])
    assert one["embedding"] == pytest.approx(again[0]["score"]) != other["embedding"]
    info = engine.get_server_info()
    assert (info["status"], info["device"], len(info["internal_states"])) == ("ready", "cpu", 1)
    with pytest.raises(InvalidRequest, match="--is-embedding"):
        engine.encode("x")


@pytest.mark.parametrize("name", ["unified", "pair"])
def test_a_session_goes_on(request, name):
    engine = request.getfixturevalue(name)
    session = engine.open_session(1000)
    first = engine.generate(PROMPTS[0], GREEDY, session_params={"id": session}, rid="first")
    then = engine.generate(" and", GREEDY, session_params={"id": session, "rid": "first"})
    added = then["meta_info"]["prompt_tokens"] - first["meta_info"]["prompt_tokens"]
    assert added == len(first["output_ids"]) + len(engine.tokenize(" and")["tokens"])
    engine.close_session(session)
    with pytest.raises(NotFound, match="no open session"):
        engine.close_session(session)


@pytest.mark.parametrize("name", ["unified", "pair"])
def test_a_request_is_aborted(request, name):
    engine = request.getfixturevalue(name)
    stream = engine.generate("Count:", {"max_new_tokens": 400, "ignore_eos": True}, rid="long", stream=True)
    next(stream)
    engine.abort_request("long")
    assert [*stream][-1]["meta_info"]["finish_reason"]["type"] == "abort"
    with pytest.raises(InvalidRequest, match="Give a rid"):
        engine.abort_request()


def test_an_embedding_engine_encodes():
    with baton.Engine("tinychat", device="cpu", log_level="warning", is_embedding=True) as engine:
        one, other = engine.encode(PROMPTS)
        alone = asyncio.run(engine.async_encode(PROMPTS[0]))
        assert one["embedding"] == pytest.approx(alone["embedding"], abs=1e-4) != other["embedding"]


@pytest.mark.parametrize("name", ["unified", "pair"])
def test_programs_run_on_engines(request, name):
    backend = lang.EngineBackend(request.getfixturevalue(name))

    @lang.function
    def program(s):
        s += lang.user(QUESTION[0]["content"])
        s += lang.assistant(lang.gen("answer", max_tokens=8))
        s += lang.user("What is the capital of Italy?") + lang.assistant(lang.select("other", ["Rome", "Oslo"]))

    state = program.run(backend=backend, temperature=0)
    assert (state["answer"], state["other"]) == ("Paris", "Rome")
    assert state.text().startswith(f"<|im_start|>user\n{QUESTION[0]['content']}<|im_end|>\n<|im_start|>assistant\n")
    stream = program.run(backend=backend, temperature=0, stream=True)
    assert "".join(stream.text_iter("answer")) == "Paris" and stream["other"] == "Rome"
    stream.sync()
    for _ in range(100):  # the pages of the last request may be a moment on their way
        with contextlib.suppress(InvalidRequest):
            return backend.flush_cache()
        time.sleep(0.05)
    raise AssertionError("the engine stays busy")


def test_processors_embeddings_and_hidden_states(unified, pair):
    answer, other = (engine.generate(PROMPTS[0], {**GREEDY, "custom_params": {"token_ids": list(range(100, 200))}},
                                     custom_logit_processor="baton.common.sampling.builtin_processors:DisallowedTokens",
                                     return_hidden_states=True) for engine in (unified, pair))
    assert answer["output_ids"] == other["output_ids"] and not {*range(100, 200)} & {*answer["output_ids"]}
    states, others = (told["meta_info"]["hidden_states"] for told in (answer, other))
    assert len(states) == 6 and states[0][-1] == pytest.approx(others[0][-1], abs=1e-3)
    rows = states[0]  # of the model's width, as embeddings are
    assert told([pair.generate(None, GREEDY, input_embeds=rows)]) == told([unified.generate(None, GREEDY,
                                                                                             input_embeds=rows)])


@pytest.mark.parametrize("name", ["unified", "pair"])
def test_streams_end_as_whole_answers(request, name):
    engine = request.getfixturevalue(name)
    last = {}
    for answer in engine.generate(PROMPTS, GREEDY, stream=True):
        last[answer["index"]] = answer
    assert told([last[0], last[1]]) == told(engine.generate(PROMPTS, GREEDY))
    chunks = engine.chat(QUESTION, temperature=0, stream=True)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Paris"


async def test_many_at_once_from_another_loop(pair):
    answers = await asyncio.gather(*(pair.async_generate(PROMPTS[i % 2], GREEDY) for i in range(8)))
    assert len({text for text, _ in told(answers)}) == 2
    parts = [part async for part in await pair.async_generate(PROMPTS[0], GREEDY, stream=True)]
    assert parts[-1]["text"] == answers[0]["text"]


@pytest.mark.parametrize("name", ["unified", "pair"])
def test_a_stream_that_is_left_frees_its_pages(request, name):
    engine = request.getfixturevalue(name)
    stream = engine.generate("Count:", {"max_new_tokens": 400, "ignore_eos": True}, stream=True)
    next(stream)
    with pytest.raises(InvalidRequest, match="Not while requests run"):
        engine.flush_cache()
    stream.close()
    for _ in range(100):
        if engine.state().held_pages == 0:
            break
    assert engine.state().held_pages == 0


def test_mistakes_are_sentences(unified, pair):
    for engine in (unified, pair):
        with pytest.raises(InvalidRequest, match="temperature"):
            engine.generate("x", {"temperature": -1})
    with pytest.raises(ConfigError, match="go together"):
        baton.Engine("tinychat", prefill={})
    with pytest.raises(ConfigError, match="no nonsense"):
        baton.Engine("tinychat", nonsense=1)
    with pytest.raises(ConfigError, match="no checkpoint folder"):
        baton.Engine("/nowhere/at/all", device="cpu")


def test_nothing_is_left_after_shutdown(unified):
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    engine = baton.Engine("tinychat", device="cpu", log_level="warning")
    started = {process.pid for process in psutil.Process().children(recursive=True)} - before
    assert started
    engine.shutdown()
    engine.shutdown()
    assert not any(psutil.pid_exists(pid) for pid in started)
    with pytest.raises(RuntimeError, match="shut down"):
        engine.generate("x")


def test_answers_are_plain_data(unified):
    json.dumps(unified.generate("x", {"max_new_tokens": 1}, return_logprob=True))

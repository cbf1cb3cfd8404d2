"""The load client against a server that says what a test tells it to, byte for byte; and its reading of each API."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json

import pytest

from baton.common.api.errors import ConfigError
from baton.common.bench.client.answer import Answer, Drafted, Failure
from baton.common.bench.client.apis import APIS, RequestOptions
from baton.common.bench.client.client import Client
from baton.common.bench.client.control import Control
from baton.common.bench.client.events import Reader, read_chat, read_completion, read_generate
from baton.common.bench.workloads.workload import Prompt
from baton.tests.helpers.ports import free_port

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SILENT = None  # says nothing more, and keeps the connection


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def generated(count, *, reason=None, text="", ids=()):
    meta = {"prompt_tokens": 7, "completion_tokens": count, "cached_tokens": 3, "finish_reason": reason}
    return event(text=text, output_ids=list(ids), meta_info=meta)


DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


class Script:
    """A server whose connections each say one of ``answers`` (lists of byte strings) after another, then close."""

    def __init__(self, *connections):
        self._connections = iter(connections)
        self.heads, self.bodies, self.num_connections = [], [], 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/base"
        return self

    async def __aexit__(self, *exc):
        self._server.close()

    async def _serve(self, reader, writer):
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for answer in next(self._connections):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.heads.append(head)
                self.bodies.append(json.loads(await reader.readexactly(length)))
                for part in answer:
                    if part is SILENT:
                        await asyncio.sleep(60)
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.005)
        writer.close()


def make_client(url, timeout=30.0, headers=None):
    ticks = itertools.count()
    return Client(url, headers or {}, timeout, lambda: float(next(ticks)))


async def ask(client, *, read=read_generate, stream=True):
    answer = Answer(Prompt(7, text="x"), 3, 0.0)
    await client.post(client.request("/generate", {"text": "x"}), Reader(answer, read, stream=stream))
    return answer


GOOD = [HEAD, chunk(generated(1, text="a")), chunk(generated(2, text="ab")),
        chunk(generated(3, text="abc", ids=[4, 5, 6], reason={"type": "length"})), chunk(DONE), END]


async def test_a_stream_and_its_connection_are_read_to_the_end():
    async with Script([GOOD, GOOD]) as server:
        client = make_client(server.url, headers={"X-Key": "value"})
        for _ in range(2):
            answer = await ask(client)
            assert (answer.num_events, answer.num_output, answer.num_prompt, answer.num_cached) == (3, 3, 7, 3)
            assert (answer.text, answer.ids) == ("abc", [4, 5, 6])
        assert server.num_connections == 1
        assert server.heads[0].startswith(b"POST /base/generate HTTP/1.1\r\n")
        assert b"X-Key: value\r\n" in server.heads[0]
        assert server.bodies == [{"text": "x"}] * 2
        client.close()


async def test_events_may_be_cut_anywhere_and_come_together():
    whole = generated(1, text="a") + b": a comment\n\n" + generated(4, text="abcd", reason={"type": "stop"}) + DONE
    for size in (1, 7, 50, len(whole)):
        parts = [whole[i:i + size] for i in range(0, len(whole), size)]
        answer = Answer(Prompt(1, text="x"), 4, 0.0)
        reader = Reader(answer, read_generate, stream=True)
        for now, part in enumerate(parts):
            reader.feed(part, float(now))
        reader.end()
        assert answer.num_events == 2 and answer.num_output_tokens == 4 and answer.text == "abcd"
    assert answer.gaps == [0.0]


async def test_an_event_without_new_tokens_is_no_token():
    answer = Answer(Prompt(1, text="x"), 1, 0.0)
    reader = Reader(answer, read_generate, stream=True)
    for now, data in enumerate((generated(1), generated(1, reason={"type": "length"}), DONE)):
        reader.feed(data, float(now))
    reader.end()
    assert (answer.first, answer.last, answer.gaps) == (0.0, 0.0, [])


REFUSED = b"HTTP/1.1 429 Too Many\r\nContent-Length: %d\r\n\r\n%s"


@pytest.mark.parametrize("answer, kind, words", [
    ([REFUSED % (40, b'{"error": {"message": "The queue is full"}}'[:40].ljust(40))], "HTTP 429", "queue"),
    ([REFUSED % (2, b"no")], "HTTP 429", "no"),
    ([HEAD, chunk(generated(1))], "broken stream", "within the answer"),
    ([HEAD, chunk(generated(1)), END], "broken stream", "without its last event"),
    ([HEAD, chunk(event(error={"message": "gone", "code": 502})), END], "error in the answer: 502", "gone"),
    ([HEAD, chunk(generated(1, reason={"type": "abort", "message": "left"})), END], "aborted", "left"),
    ([HEAD, chunk(b"data: {nonsense\n\n"), END], "unreadable answer", "nonsense"),
    ([b"SSH-2.0-OpenSSH\r\n"], "unreadable answer", "HTTP"),
    ([HEAD, SILENT], "timeout", "within 0.3 s"),
])
async def test_what_is_no_answer_is_a_failure_of_its_kind(answer, kind, words):
    async with Script([answer], [GOOD]) as server:
        client = make_client(server.url, timeout=0.3 if SILENT in answer else 30.0)
        with pytest.raises(Failure, match=words) as failure:
            await ask(client)
        assert failure.value.kind == kind
        if SILENT not in answer:
            assert (await ask(client)).num_output == 3  # on another connection, or a reusable one
        client.close()


async def test_a_refused_connection_is_kept_for_the_next_request():
    body = b'{"error": {"message": "Slow down"}}'
    async with Script([[REFUSED % (len(body), body)], GOOD]) as server:
        client = make_client(server.url)
        with pytest.raises(Failure, match="Slow down"):
            await ask(client)
        assert (await ask(client)).num_output == 3 and server.num_connections == 1
        client.close()


async def test_a_connection_that_the_server_let_go_is_replaced():
    async with Script([GOOD], [GOOD]) as server:  # each closes behind its answer, without saying so before
        client = make_client(server.url)
        await ask(client)
        await asyncio.sleep(0.05)
        assert (await ask(client)).num_output == 3 and server.num_connections == 2
        client.close()


async def test_a_server_that_only_hangs_up_and_none_at_all():
    async with Script([], []) as server:
        for url in (server.url, f"http://127.0.0.1:{free_port()}"):
            with pytest.raises(Failure) as failure:
                await ask(make_client(url))
            assert failure.value.kind == "connection"


async def test_a_request_that_is_cancelled_closes_its_connection():
    async with Script([[HEAD, SILENT]], [GOOD]) as server:
        client = make_client(server.url)
        task = asyncio.ensure_future(ask(client))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await ask(client)).num_output == 3 and server.num_connections == 2
        client.close()


def test_an_address_that_is_none_is_a_sentence():
    for address in ("localhost:30000", "ftp://host", "http://"):
        with pytest.raises(ConfigError, match="http://HOST:PORT"):
            make_client(address)


# ---------------------------------------------------------------------- the APIs


def read_all(read, *events):
    answer = Answer(Prompt(1, text="x"), 3, 0.0)
    reader = Reader(answer, read, stream=True)
    for now, data in enumerate((*events, DONE)):
        reader.feed(data, float(now))
    reader.end()
    return answer


USAGE = {"prompt_tokens": 5, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}


def test_a_server_that_is_waited_for_is_named(capsys):
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=f"No server answers at {address}"):
        Control(address, {}).wait_ready(0.1)
    assert capsys.readouterr().err.count(f"Waiting up to 0.1 s for {address}") == 1


def test_completions_count_by_usage_and_time_by_event():
    answer = read_all(read_completion, event(choices=[{"text": "a", "finish_reason": None}]),
                      event(choices=[{"text": "", "finish_reason": None}]),  # half a character
                      event(choices=[{"text": "", "finish_reason": "length"}]), event(choices=[], usage=USAGE))
    assert (answer.first, answer.gaps, answer.text) == (0.0, [1.0], "a")
    assert (answer.num_prompt, answer.num_output, answer.num_cached) == (5, 4, 2)


def test_a_chats_first_token_is_its_first_words():
    answer = read_all(read_chat, event(choices=[{"delta": {"role": "assistant", "content": ""}}]),
                      event(choices=[{"delta": {"reasoning_content": "hm"}}]),
                      event(choices=[{"delta": {"content": "a"}}]),
                      event(choices=[{"delta": {}, "finish_reason": "stop"}]), event(choices=[], usage=USAGE))
    assert (answer.first, answer.last, answer.text, answer.num_output) == (1.0, 2.0, "a", 4)


def test_without_usage_events_are_counted():
    answer = read_all(read_chat, *[event(choices=[{"delta": {"content": "a"}}])] * 3)
    assert answer.num_output is None and answer.num_output_tokens == 3 and answer.num_input_tokens == 1


@pytest.mark.parametrize("read, body", [
    (read_generate, {"text": "abc", "output_ids": [1, 2],
                     "meta_info": {"completion_tokens": 2, "finish_reason": {"type": "stop"}}}),
    (read_completion, {"choices": [{"text": "abc", "finish_reason": "stop"}], "usage": USAGE}),
    (read_chat, {"choices": [{"message": {"content": "abc"}}], "usage": USAGE})])
def test_whole_answers_have_no_first_token(read, body):
    answer = Answer(Prompt(1, text="x"), 3, 0.0)
    reader = Reader(answer, read, stream=False)
    data = json.dumps(body).encode()
    reader.feed(data[:9], 1.0)
    reader.feed(data[9:], 2.0)
    reader.end()
    assert answer.text == "abc" and answer.ttft is None and answer.tpot is None and answer.e2e == 2.0
    assert answer.num_output == (2 if read is read_generate else 4)


SPEC = {"spec_verify_ct": 4, "spec_draft_token_num": 12, "spec_accept_token_num": 6,
        "spec_accept_histogram": [1, 1, 1, 1]}


def test_drafts_of_our_servers_and_of_sglang_s():
    def generated(**more):
        return {"text": "a", "output_ids": [1], "meta_info": {
            "completion_tokens": 11, "finish_reason": {"type": "stop"}, **more}}

    assert read_all(read_generate, event(**generated())).drafted is None
    assert read_all(read_generate, event(**generated(**SPEC))).drafted == Drafted(4, 12, 6, [1, 1, 1, 1])
    found = read_all(read_generate, event(**generated(**SPEC, spec_acceptance_simulated=True))).drafted
    assert found.simulated and found == Drafted.of_meta({**SPEC, "spec_acceptance_simulated": True})
    assert Drafted.of_meta({"spec_verify_ct": 3}) == Drafted(3, 0, 0)  # an older SGLang's
    assert Drafted.of_meta({"completion_tokens": 3}) is None


@pytest.mark.parametrize("read", [read_completion, read_chat])
def test_drafts_of_openai_s_usage(read):
    details = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 6}
    for usage, want in (({}, None), ({"completion_tokens_details": {"reasoning_tokens": 3}}, None),
                        ({"completion_tokens_details": {**details, "rejected_prediction_tokens": 0,
                                                        "accepted_prediction_tokens": 0}}, None),
                        ({"completion_tokens_details": details}, Drafted(4, 12, 6)),
                        ({"completion_tokens_details": {**details, "simulated_acceptance": True}},
                         Drafted(4, 12, 6, simulated=True))):
        answer = read_all(read, event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 11, **usage}))
        assert answer.drafted == want


SAID = [(Prompt(1, text="Hi"), Answer(Prompt(1, text="Hi"), 1, 0.0, text=" there"))]


def test_bodies_of_each_api():
    options = RequestOptions("m", extra={"sampling_params": {"temperature": 0.5}, "top_p": 0.9})
    body = APIS["baton"].body(options, SAID, Prompt(1, text=" now"), 9)
    assert body == {"text": "Hi there now", "model": "m", "stream": True, "top_p": 0.9,
                    "sampling_params": {"temperature": 0.5, "max_new_tokens": 9, "ignore_eos": True}}
    with_ids = [(Prompt(2, ids=[1, 2]), Answer(Prompt(2, ids=[1, 2]), 1, 0.0, ids=[3]))]
    assert APIS["sglang"].body(RequestOptions(), with_ids, Prompt(1, ids=[4]), 9)["input_ids"] == [1, 2, 3, 4]
    body = APIS["vllm"].body(RequestOptions("m", ignore_eos=False), (), Prompt(1, ids=[4]), 9)
    assert body == {"model": "m", "prompt": [4], "max_tokens": 9, "temperature": 0, "stream": True,
                    "stream_options": {"include_usage": True}}
    body = APIS["openai-chat"].body(RequestOptions("m", stream=False), SAID, Prompt(1, text="now"), 9)
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert body["max_completion_tokens"] == 9 and not body["stream"] and "stream_options" not in body
    asking = RequestOptions(logprobs=True)
    for name, field, value in (("sglang", "return_logprob", True), ("vllm", "logprobs", 1),
                               ("vllm-chat", "logprobs", True)):
        assert APIS[name].body(asking, (), Prompt(1, text="now"), 9)[field] is value
    for name, said in (("openai", with_ids), ("openai-chat", ())):
        with pytest.raises(ConfigError, match="--tokenize-prompt"):
            APIS[name].body(RequestOptions(), said, Prompt(1, ids=[4]), 9)

"""Stored answers of ``/v1/responses`` through a router of two processes, with pairs whose decode servers store them."""

from __future__ import annotations

import time

import openai
import pytest

from baton.tests.helpers.harness import Cluster

QUESTION = "What is the capital of France?"
LONG = {"ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("stored"), decode=2,
                 router_flags=("--policy", "round_robin", "--router-workers", "2")) as cluster:
        yield cluster


def client(cluster):
    """A client with a connection of its own: any of the router's processes may get it."""
    return openai.OpenAI(base_url=cluster.url + "/v1", api_key="none", max_retries=0)


def ended(cluster, name):
    deadline = time.monotonic() + 30
    while (found := client(cluster).responses.retrieve(name)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_any_router_process_finds_what_any_decode_server_stores(cluster):
    first = [client(cluster).responses.create(model="tinychat", temperature=0, input=QUESTION) for _ in range(4)]
    assert len({answer.id[5:17] for answer in first}) == 2, "both decode servers store some"
    assert all("Paris" in answer.output_text for answer in first)
    for answer in first:
        assert client(cluster).responses.retrieve(answer.id).output_text == answer.output_text
        [item] = client(cluster).responses.input_items.list(answer.id).data
        assert item.content[0].text == QUESTION
    direct = client(cluster).responses.create(model="tinychat", temperature=0, input=[
        {"role": "user", "content": QUESTION}, {"role": "assistant", "content": first[0].output_text},
        {"role": "user", "content": "How do you spell banana?"}])
    further = [client(cluster).responses.create(model="tinychat", temperature=0, input="How do you spell banana?",
                                                previous_response_id=answer.id) for answer in first]
    assert {answer.output_text for answer in further} == {direct.output_text}
    assert {answer.usage.input_tokens for answer in further} == {direct.usage.input_tokens}
    assert any(answer.id[5:17] != answer.previous_response_id[5:17] for answer in further), "any pair continues it"
    client(cluster).responses.delete(first[0].id)
    for call in (client(cluster).responses.retrieve, client(cluster).responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(first[0].id)
    with pytest.raises(openai.NotFoundError) as refused:
        client(cluster).responses.create(model="tinychat", input="x", previous_response_id=first[0].id)
    assert refused.value.code in ("response_not_found", "response_not_usable")
    for server in cluster.workers:
        server.assert_clean()


def test_the_background_of_a_pair(cluster):
    answers = [client(cluster).responses.create(model="tinychat", temperature=0, input=QUESTION, background=True)
               for _ in range(4)]
    assert {answer.status for answer in answers} == {"queued"}
    for answer in answers:
        assert "Paris" in ended(cluster, answer.id).output_text
    running = client(cluster).responses.create(model="tinychat", input=QUESTION, background=True, extra_body=LONG)
    with pytest.raises(openai.ConflictError, match="still runs"):
        client(cluster).responses.create(model="tinychat", input="x", previous_response_id=running.id)
    assert client(cluster).responses.cancel(running.id).status == "cancelled"
    assert client(cluster).responses.retrieve(running.id).status == "cancelled"
    stream = client(cluster).responses.create(model="tinychat", temperature=0, input=QUESTION, background=True,
                                              stream=True)
    name = next(iter(stream)).response.id
    stream.close()  # Prefill's half goes with it; decode computes what it lacks.
    *_, last = client(cluster).responses.retrieve(name, stream=True, starting_after=1)
    assert last.type == "response.completed" and "Paris" in last.response.output_text
    for server in cluster.workers:
        server.assert_clean()


def test_what_a_server_that_left_stored_is_not_found(cluster):
    answers = [client(cluster).responses.create(model="tinychat", input="x", max_output_tokens=4) for _ in range(2)]
    gone = cluster.decode[0]
    gone.kill()
    gone.start().wait_ready()
    cluster._wait_routed()
    deadline, lost = time.monotonic() + 30, set()
    while not lost:
        for answer in answers:
            try:
                client(cluster).responses.retrieve(answer.id)
            except openai.NotFoundError as error:
                assert "its server has left" in str(error)
                lost.add(answer.id)
            except openai.APIStatusError as error:
                assert error.status_code in (502, 503) and time.monotonic() < deadline
        time.sleep(0.05)
    assert len(lost) == 1

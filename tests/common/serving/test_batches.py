"""Files and batches, with OpenAI's client, on a real server over a fake engine."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web

from baton.common.config.server import ScheduleArgs
from baton.common.serving.batches.job import BatchJob, BatchSlots
from baton.common.serving.storage.batch_schema import CreateBatch
from baton.common.serving.storage.storage import Storage
from baton.tests.helpers.fake_engine import Seed
from baton.tests.helpers.serving import Server

URL = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def keeper(checkpoint: Path, folder: Path) -> Iterator[Server]:
    server = Server(folder / "log", "--model-path", str(checkpoint), "--file-storage-path", str(folder / "kept"),
                    "--batch-concurrency", "4")
    try:
        yield server.wait_ready()
        assert "Traceback" not in server.log.read_text()
    finally:
        server.kill()


@pytest.fixture
def ai(keeper: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=keeper.url + "/v1", api_key="none", max_retries=0)


def line(number: int, url: str = URL, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"hello {number}"}]} | body
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}


def upload(ai: openai.OpenAI, lines: list[Any], **extra: Any) -> str:
    content = "\n".join(text if isinstance(text, str) else json.dumps(text) for text in lines).encode()
    return ai.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch", **extra).id


def start(ai: openai.OpenAI, lines: list[Any], endpoint: Any = URL, window: Any = "24h", **extra: Any) -> Any:
    return ai.batches.create(input_file_id=upload(ai, lines), endpoint=endpoint, completion_window=window, **extra)


def wait(ai: openai.OpenAI, batch_id: str, *statuses: str, seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while (batch := ai.batches.retrieve(batch_id)).status not in (statuses or ("completed",)):
        assert time.monotonic() < end, batch
        time.sleep(0.05)
    return batch


def lines_of(ai: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(text) for text in ai.files.content(file_id or "").text.splitlines()]


# ---------------------------------------------------------------- files


def test_a_file_lives(ai: openai.OpenAI) -> None:
    content = bytes(range(256)) * 9000
    made = ai.files.create(file=("wörds.bin", io.BytesIO(content)), purpose="user_data",
                           expires_after={"anchor": "created_at", "seconds": 3600})
    assert (made.filename, made.bytes, made.purpose) == ("wörds.bin", len(content), "user_data")
    assert made.expires_at == made.created_at + 3600
    assert ai.files.retrieve(made.id) == made
    assert ai.files.content(made.id).read() == content
    others = [upload(ai, [line(i)]) for i in range(3)]
    assert [file.id for file in ai.files.list(limit=1, purpose="batch")][:3] == others[::-1]
    first = ai.files.list(limit=2, order="asc")
    assert first.has_more and made.id in [file.id for file in ai.files.list(order="asc")]
    assert ai.files.delete(made.id).deleted
    for use in (ai.files.retrieve, ai.files.content, ai.files.delete):
        with pytest.raises(openai.NotFoundError):
            use(made.id)


@pytest.mark.parametrize("files, data", [
    ({"file": b"x"}, {"purpose": "fun"}), ({"file": b"x"}, {}), ({}, {"purpose": "batch"}),
    ({"file": b"x"}, {"purpose": "batch" * 999}), ({"file": b"x"}, {"purpose": "batch", "more": "1"}),
    ({"file": b"x"}, {"purpose": "batch", "expires_after[anchor]": "now", "expires_after[seconds]": "3600"}),
    ({"file": b"x"}, {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"})])
def test_bad_uploads(keeper: Server, folder: Path, files: Any, data: Any) -> None:
    before = sorted((folder / "kept/files").iterdir())
    answer = httpx.post(keeper.url + "/v1/files", files=files or {"other": b""}, data=data)
    assert answer.status_code == 400 and answer.json()["error"]["message"].endswith(".")
    assert sorted((folder / "kept/files").iterdir()) == before


@pytest.mark.parametrize("kind, body", [
    ("application/json", b"{}"), ("multipart/form-data", b"--x"), ("multipart/form-data; boundary=x", b"no form"),
    ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\ntorn"),
    ("multipart/form-data; boundary=x", b"--x\r\nContent-Di"),
    ("multipart/form-data; boundary=x", b""), ("multipart/mixed; boundary=x", b"--x--\r\n"),
    ("multipart/form-data; boundary=x", b"--x\r\nContent-Type: multipart/mixed; boundary=y\r\n\r\n--y--\r\n--x--")])
def test_forms_that_are_none(keeper: Server, kind: str, body: bytes) -> None:
    answer = httpx.post(keeper.url + "/v1/files", content=body, headers={"Content-Type": kind})
    assert answer.status_code == 400, answer.text


# ---------------------------------------------------------------- batches


def test_a_batch(ai: openai.OpenAI) -> None:
    lines = [line(i) for i in range(20)]
    lines[3]["body"]["temperature"] = -1
    lines[4]["body"]["model"] = "gpt-5"
    lines[5]["body"]["stream"] = True
    lines[6]["body"]["messages"] = "hello"
    lines[7]["body"]["seed"] = Seed.FAIL_FIRST
    batch = start(ai, lines, metadata={"job": "évening"})
    assert (batch.status, batch.endpoint, batch.metadata) == ("validating", URL, {"job": "évening"})
    assert batch.expires_at == batch.created_at + 86_400
    done = wait(ai, batch.id)
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 15, 5)
    assert done.completed_at >= done.finalizing_at >= done.in_progress_at >= done.created_at
    answers = lines_of(ai, done.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"line-{i}" for i in range(20) if not 3 <= i <= 7]
    first = answers[0]["response"]
    assert first["status_code"] == 200 and first["body"]["choices"][0]["message"]["content"] == "hello 0"
    failures = lines_of(ai, done.error_file_id)
    assert [failure["response"]["status_code"] for failure in failures] == [400, 404, 400, 400, 502]
    assert failures[0]["response"]["body"]["error"]["param"] == "temperature"
    assert ai.files.retrieve(done.output_file_id).purpose == "batch_output"
    assert batch.id in [listed.id for listed in ai.batches.list(limit=1)]


def test_completions_in_a_batch(ai: openai.OpenAI) -> None:
    lines = [line(1, "/v1/completions", prompt=["fox", "dog"], max_tokens=9)]
    done = wait(ai, start(ai, lines, "/v1/completions").id)
    body = lines_of(ai, done.output_file_id)[0]["response"]["body"]
    assert [choice["text"] for choice in body["choices"]] == ["fox", "dog"]
    assert done.error_file_id is None


def test_responses_in_a_batch(ai: openai.OpenAI) -> None:
    lines = [line(1, "/v1/responses", input="fox"), line(2, "/v1/responses", input="fox", background=True)]
    done = wait(ai, start(ai, lines, "/v1/responses").id)
    body = lines_of(ai, done.output_file_id)[0]["response"]["body"]
    assert body["object"] == "response" and body["output"][0]["content"][0]["text"] == "fox"
    assert lines_of(ai, done.error_file_id)[0]["response"]["body"]["error"]["param"] == "background"


def test_an_input_file_that_is_wrong(ai: openai.OpenAI) -> None:
    lines = ["{", line(1), line(1), line(2) | {"method": "GET"}, line(3, "/v1/completions"), {"custom_id": "x"}, "",
             line(4) | {"body": [1]}]
    failed = wait(ai, start(ai, lines).id, "failed")
    assert [(error.line, error.code) for error in failed.errors.data] == [
        (1, "invalid_json_line"), (3, "duplicate_custom_id"), (4, "invalid_method"), (5, "mismatched_endpoint"),
        (6, "invalid_request"), (8, "invalid_body")]
    assert failed.failed_at and failed.output_file_id is None
    assert wait(ai, start(ai, [""]).id, "failed").errors.data[0].code == "empty_file"


def test_batches_that_are_refused(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        ai.batches.create(input_file_id="file-x", endpoint=URL, completion_window="24h")
    other = ai.files.create(file=b"x", purpose="user_data").id
    good = upload(ai, [line(1)])
    refused: list[dict[str, Any]] = [
        {"input_file_id": other}, {"endpoint": "/v1/moderations"}, {"completion_window": "8d"},
        {"completion_window": "soon"}, {"metadata": {str(i): "" for i in range(17)}},
        {"output_expires_after": {"anchor": "created_at", "seconds": 1}}]
    for wrong in refused:
        with pytest.raises(openai.BadRequestError):
            ai.batches.create(**({"input_file_id": good, "endpoint": URL, "completion_window": "24h"} | wrong))
    with pytest.raises(openai.NotFoundError):
        ai.batches.retrieve("batch_x")
    with pytest.raises(openai.BadRequestError):
        ai.batches.list(after="batch_x").data  # noqa: B018


def test_cancelling_keeps_what_is_answered(ai: openai.OpenAI) -> None:
    lines = [line(0), *[line(i, seed=Seed.SILENT) for i in range(1, 8)]]
    batch = start(ai, lines)
    end = time.monotonic() + 30
    while not ai.batches.retrieve(batch.id).request_counts.completed:
        assert time.monotonic() < end
        time.sleep(0.05)
    with pytest.raises(openai.ConflictError):
        ai.files.delete(batch.input_file_id)
    assert ai.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = wait(ai, batch.id, "cancelled")
    assert done.cancelled_at >= done.cancelling_at
    assert [answer["custom_id"] for answer in lines_of(ai, done.output_file_id)] == ["line-0"]
    assert {answer["error"]["code"] for answer in lines_of(ai, done.error_file_id)} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError):
        ai.batches.cancel(batch.id)
    ai.files.delete(batch.input_file_id)


def test_a_batch_expires(ai: openai.OpenAI, keeper: Server) -> None:
    done = wait(ai, start(ai, [line(0), line(1, seed=Seed.SILENT)], window="3s").id, "expired")
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 1) and done.expired_at
    assert lines_of(ai, done.error_file_id)[0]["error"]["code"] == "batch_expired"
    keeper.wait(lambda: keeper.engine()["num_running"] == 0)


async def test_an_answer_that_is_recorded_while_its_batch_expires_counts_once(tmp_path: Path) -> None:
    """Whoever records it may be cancelled while the database is at work: it is there all the same."""
    store = Storage(str(tmp_path))
    try:
        file_id, size = store.files.write([b"{}"])
        await store.files.add(file_id, "in.jsonl", "batch", size, None)
        batch = await store.batches.create(CreateBatch(input_file_id=file_id, endpoint=URL))
        assert (await store.batches.claim()).batch.id == batch.id  # type: ignore[union-attr]
        await store.batches.begin(batch.id, 50)
        for number in range(1, 51):
            recording = asyncio.ensure_future(store.batches.record(batch.id, number, True, b"{}"))
            await asyncio.sleep(0.0001 * (number % 5))
            recording.cancel()
        answered = await store.batches.answered(batch.id)
        assert answered and answered <= set(range(1, 51))
        for number in set(range(1, 51)) - answered:  # as the lines of a batch that expires are given up
            await store.batches.record(batch.id, number, False, b"{}")
        counts = (await store.batches.get(batch.id)).request_counts
        assert (counts.completed, counts.failed) == (len(answered), 50 - len(answered))
    finally:
        store.close()


async def test_a_batch_is_cancelled_before_its_file_is_examined(tmp_path: Path) -> None:
    store = Storage(str(tmp_path))
    try:
        file_id, size = store.files.write([b"{}\nno JSON"])
        await store.files.add(file_id, "in.jsonl", "batch", size, None)
        batch = await store.batches.create(CreateBatch(input_file_id=file_id, endpoint=URL))
        assert (await store.batches.cancel(batch.id)).status == "cancelling"
        claimed = await store.batches.claim()
        nobody: Any = None
        await BatchJob(nobody, store, claimed, {URL: nobody}, nobody).run()  # type: ignore[arg-type]
        ended = await store.batches.get(batch.id)
        assert (ended.status, ended.output_file_id, ended.error_file_id) == ("cancelled", None, None)
        assert await store.batches.claim() is None
    finally:
        store.close()


@pytest.mark.parametrize("schedule, named", [
    (ScheduleArgs(), [5, None]),
    (ScheduleArgs(enable_priority_scheduling=True), [-2**31] * 2),
    (ScheduleArgs(enable_priority_scheduling=True, schedule_low_priority_values_first=True), [2**31 - 1] * 2)])
async def test_lines_have_the_lowest_priority(tmp_path: Path, schedule: ScheduleArgs, named: list[int | None]) -> None:
    seen = []

    async def answer(front: Any, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        seen.append(body.get("priority"))
        assert body["messages"][0]["content"].startswith("hello")
        return web.Response(body=b"{}")

    http = SimpleNamespace(max_payload_size=1 << 20)
    context: Any = SimpleNamespace(status=SimpleNamespace(is_ready=True), client=SimpleNamespace(num_open=0),
                                   config=SimpleNamespace(schedule=schedule, http=http))
    store: Any = Storage(str(tmp_path))
    try:
        text = "\n".join(json.dumps(text) for text in (line(1, priority=5), line(2)))
        file_id, size = store.files.write([text.encode()])
        await store.files.add(file_id, "in.jsonl", "batch", size, None)
        batch = await store.batches.create(CreateBatch(input_file_id=file_id, endpoint=URL))
        await BatchJob(context, store, await store.batches.claim(), {URL: answer}, BatchSlots(context, 1)).run()
        assert (await store.batches.get(batch.id)).status == "completed" and seen == named
    finally:
        store.close()


def test_lines_may_leave_out_the_prefix(ai: openai.OpenAI) -> None:
    done = wait(ai, start(ai, [line(1), line(2, URL.removeprefix("/v1"))]).id)
    assert len(lines_of(ai, done.output_file_id)) == 2 and done.error_file_id is None


def test_others_come_first(ai: openai.OpenAI, keeper: Server) -> None:
    """Four places: with three other requests open a batch has one, and never none."""
    silent = {"messages": [{"role": "user", "content": "x"}], "seed": Seed.SILENT, "stream": True}
    others = [httpx.Client(timeout=None) for _ in range(6)]
    import threading

    threads = [threading.Thread(target=lambda c=c: _swallow(c, keeper.url + URL, silent), daemon=True) for c in others]
    for thread in threads:
        thread.start()
    keeper.wait(lambda: keeper.engine()["num_running"] == 6)
    batch = start(ai, [line(i, seed=Seed.SILENT) for i in range(5)])
    keeper.wait(lambda: keeper.engine()["num_running"] == 7)
    time.sleep(0.5)
    assert keeper.engine()["num_running"] == 7
    httpx.post(keeper.url + "/abort_request", json={"abort_all": True})  # ends the six, and the batch's line
    keeper.wait(lambda: keeper.engine()["num_running"] == 4)
    ai.batches.cancel(batch.id)
    done = wait(ai, batch.id, "cancelled")
    ended = [line["response"] for line in lines_of(ai, done.output_file_id) if line["response"]]
    assert [one["body"]["choices"][0]["finish_reason"] for one in ended] == ["abort"]
    keeper.wait(lambda: keeper.engine()["num_running"] == 0)


def _swallow(client: httpx.Client, url: str, body: dict[str, Any]) -> None:
    try:
        client.post(url, json=body)
    except httpx.HTTPError:
        pass


def test_files_expire(ai: openai.OpenAI, folder: Path) -> None:
    """No test waits an hour: the entry is moved into the past."""
    file_id = upload(ai, [line(0)], expires_after={"anchor": "created_at", "seconds": 3600})
    with sqlite3.connect(folder / "kept/baton.sqlite3", timeout=30) as connection:
        connection.execute("UPDATE files SET expires_at = 1 WHERE id = ?", (file_id,))
    with pytest.raises(openai.NotFoundError):
        ai.files.retrieve(file_id)
    with pytest.raises(openai.NotFoundError):
        ai.batches.create(input_file_id=file_id, endpoint=URL, completion_window="24h")


def test_a_server_without_storage_says_so(server: Server) -> None:
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches")):
        answer = httpx.request(method, server.url + path, headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 404 and "--file-storage-path" in answer.json()["error"]["message"]


# ---------------------------------------------------------------- death


@pytest.mark.parametrize("number, beside", [(signal.SIGKILL, False), (signal.SIGTERM, False), (signal.SIGKILL, True)])
def test_a_batch_continues_after_answered_lines(checkpoint: Path, tmp_path: Path, number: int, beside: bool) -> None:
    """The server ends in the middle: the next one, or one ``beside`` it, answers the rest, and nothing twice."""
    flags = ["--model-path", str(checkpoint), "--file-storage-path", str(tmp_path / "kept"), "--batch-concurrency", "2",
             "--shutdown-grace-secs", "1"]
    first = Server(tmp_path / "log1", *flags).wait_ready()
    second = Server(tmp_path / "log2", *flags).wait_ready() if beside else None
    ai = openai.OpenAI(base_url=first.url + "/v1", api_key="none", max_retries=0)
    try:
        if second is not None:
            second.process.send_signal(signal.SIGSTOP)  # the first one is to claim the batch
        batch = start(ai, [line(i) for i in range(150)])
        end = time.monotonic() + 60
        while ai.batches.retrieve(batch.id).request_counts.completed < 20:
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        first.end(number)
        if second is not None:
            second.process.send_signal(signal.SIGCONT)
    with sqlite3.connect(tmp_path / "kept/baton.sqlite3") as connection:
        before = dict(connection.execute("SELECT line, text FROM answers").fetchall())
    assert 20 <= len(before) < 150
    second = second or Server(tmp_path / "log2", *flags).wait_ready()
    try:
        ai = openai.OpenAI(base_url=second.url + "/v1", api_key="none", max_retries=0)
        done = wait(ai, batch.id)
        content = ai.files.content(done.output_file_id).content.splitlines(keepends=True)
        metrics = httpx.get(second.url + "/metrics").text
    finally:
        second.kill()
    assert [json.loads(text)["custom_id"] for text in content] == [f"line-{i}" for i in range(150)]
    assert all(content[number - 1] == text for number, text in before.items())
    again = sum(float(text.rsplit(" ", 1)[1]) for text in metrics.splitlines()
                if text.startswith("baton:num_requests_total") and 'outcome="stop"' in text)
    assert again == 150 - len(before)
    assert done.request_counts.completed == 150 and done.request_counts.failed == 0

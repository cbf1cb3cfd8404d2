"""Endpoints that have further names or methods, as SGLang's clients and SageMaker call them."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from baton.common.config.cli import build
from baton.common.config.server import ServerConfig
from baton.common.models.registry import load_model_spec
from baton.common.serving.context.served_model import ServedModel
from baton.common.serving.embeddings.schema import probabilities
from baton.tests.helpers.fake_engine import Seed
from baton.tests.helpers.serving import Server, generate, wait_running


async def test_the_size_of_the_kv_pool(http: aiohttp.ClientSession) -> None:
    for method in ("GET", "POST"):
        async with http.request(method, "/get_memory_pool_size") as answer:
            assert (answer.status, await answer.json()) == (200, 10_000)
    async with http.get("/get_max_total_num_tokens") as answer:
        assert await answer.json() == {"max_total_num_tokens": 10_000}
    async with http.get("/get_server_args") as answer:
        args = await answer.json()
    assert args["max_total_num_tokens"] == 10_000 and args["api_key"] is None and "tp_size" in args


@pytest.mark.parametrize("path, other, body", [
    ("/v1/chat/completions", "/invocations", {"messages": [{"role": "user", "content": "hello"}]}),
    ("/parse_function_call", "/function_call", {"text": "hello", "tools": [], "tool_call_parser": "hermes"})])
async def test_other_paths_answer_alike(http: aiohttp.ClientSession, path: str, other: str, body: dict) -> None:
    answers = []
    for each in (path, other):
        async with http.post(each, json=body) as answer:
            assert answer.status == 200, await answer.text()
            answers.append({name: value for name, value in (await answer.json()).items() if name not in (
                "id", "created", "metadata")})
    assert answers[0] == answers[1]


async def test_sagemaker_s_probe_needs_no_key(server: Server) -> None:
    async with aiohttp.ClientSession(server.url) as session, session.get("/ping") as answer:
        assert answer.status == 200


@pytest.mark.parametrize("method, path, body", [
    ("PUT", "/generate", {"text": "hello"}), ("PUT", "/set_internal_state", {"server_args": {
        "schedule_policy": "fcfs"}}),
    *(("GET", path, {}) for path in ("/freeze_gc", "/slow_down", "/start_profile", "/stop_profile",
                                     "/release_memory_occupation",
                                     "/resume_memory_occupation", "/start_expert_distribution_record",
                                     "/stop_expert_distribution_record", "/dump_expert_distribution_record"))])
async def test_other_methods(http: aiohttp.ClientSession, method: str, path: str, body: dict) -> None:
    async with http.request(method, path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        if path != "/generate":
            assert await answer.json() == {"success": True, "message": "Done."}


async def test_methods_of_endpoints_for_vectors(http: aiohttp.ClientSession) -> None:
    """This server generates: the handlers refuse, but for yes and no of a rerank."""
    for path in ("/encode", "/classify"):
        async with http.put(path, json={"text": "hello"}) as answer:
            assert answer.status == 400 and "--is-embedding" in await answer.text()
    async with http.put("/v1/rerank", json={"query": "a", "documents": []}) as answer:
        assert answer.status == 400 and "documents is empty" in await answer.text()


async def test_a_session_by_get(http: aiohttp.ClientSession) -> None:
    async with http.get("/open_session", json={"capacity_of_str_len": 1000}) as answer:
        session = await answer.json()
    for status in (200, 404):
        async with http.get("/close_session", json={"session_id": session}) as answer:
            assert answer.status == status


async def test_weights_get_another_name(http: aiohttp.ClientSession) -> None:
    """With the weights, or alone."""
    async with http.post("/update_weight_version", json={"new_version": "v2", "abort_all_requests": False}) as answer:
        told = await answer.json()
    assert (told["success"], told["new_version"]) == (True, "v2")
    try:
        async with http.get("/get_weight_version") as answer:
            assert await answer.json() == {"weight_version": "v2"}
        async with http.get("/get_server_info") as answer:
            assert (await answer.json())["weight_version"] == "v2"
        async with http.post("/generate", json={"text": "hello"}) as answer:
            assert (await answer.json())["meta_info"]["weight_version"] == "v2"
        async with http.post("/update_weight_version", json={}) as answer:
            assert answer.status == 400 and "new_version" in await answer.text()
    finally:
        async with http.post("/update_weight_version", json={"new_version": "default"}) as answer:
            assert answer.status == 200


async def test_another_name_may_abort_what_runs(http: aiohttp.ClientSession) -> None:
    task = asyncio.create_task(generate(http, text="hello", sampling_params={"seed": int(Seed.SILENT)}))
    await wait_running(http, 1)
    async with http.post("/update_weight_version", json={"new_version": "default"}) as answer:
        assert answer.status == 200
    _, ended = await task
    assert ended["meta_info"]["finish_reason"]["type"] == "abort"


async def test_requests_are_logged_on_demand(server: Server, http: aiohttp.ClientSession) -> None:
    for fields, logged in (({"log_requests": True, "log_requests_level": 0}, True), ({"log_requests_level": 1}, True),
                           ({"log_requests": False}, False), ({}, False)):
        async with http.post("/configure_logging", json=fields) as answer:
            told = await answer.json()
        assert told["success"] and ("level" in told["message"]) is logged
        name = f"logged-{len(fields)}-{logged}"
        await generate(http, text="hello", rid=name)
        assert (f'"rid":"{name}"' in server.log.read_text()) is logged
    for fields in ({"dump_requests_folder": "/x"}, {"crash_dump_folder": "/proc/none"}, {"log_requests_level": 4}):
        async with http.post("/configure_logging", json=fields) as answer:
            assert answer.status == 400 and next(iter(fields)) in await answer.text()


async def test_the_delay_of_steps_has_a_limit(http: aiohttp.ClientSession) -> None:
    for seconds, status in ((0.5, 200), (11, 400), (-1, 400), (None, 200)):
        async with http.post("/slow_down", json={"forward_sleep_time": seconds}) as answer:
            assert answer.status == status


async def test_labels_of_a_model_that_has_none(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/classify", json={"input": "hello"}) as answer:
        assert answer.status == 400 and "is no classifier" in await answer.text()


@pytest.mark.parametrize("scores, expected", [
    ([0.0, 0.0], [0.5, 0.5]), ([1000.0, 0.0], [1.0, 0.0]), ([0.0], [0.5]), ([-1000.0], [0.0]),
    ([math.log(3)], [0.75]), ([math.log(3), 0.0], [0.75, 0.25])])
def test_probabilities_of_labels(scores: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(probabilities(np.array(scores, np.float32)), expected, atol=1e-6)


def test_names_of_labels(checkpoint: Path, tmp_path: Path) -> None:
    """Those of config.json, or transformers' own."""
    config = json.loads((checkpoint / "config.json").read_text())
    config["architectures"] = ["Qwen3ForSequenceClassification"]
    for names, expected in (({"id2label": {"0": "bad", "1": "good"}}, ("bad", "good")),
                            ({"num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2"))):
        (tmp_path / "config.json").write_text(json.dumps(config | names))
        served = build(ServerConfig, {"model_path": str(tmp_path), "is_embedding": True})
        assert ServedModel(served, load_model_spec(served.model)).labels == expected


async def test_embeddings_from_a_file(http: aiohttp.ClientSession) -> None:
    """64 numbers a row; the fake engine answers with the ids of the prompt, which mean nothing here."""
    rows = [[0.5] * 64] * 3
    for content, count in ((rows, 1), ([rows, rows], 2)):
        form = aiohttp.FormData()
        form.add_field("file", json.dumps(content), filename="embeds.json")
        async with http.post("/generate_from_file", data=form) as answer:
            told = await answer.json()
        assert answer.status == 200, told
        answers = told if isinstance(told, list) else [told]
        assert isinstance(told, list) is (count == 2) and len(answers) == count
        assert all(each["meta_info"]["prompt_tokens"] == 3 and each["output_ids"][:3] == [0] * 3 for each in answers)


@pytest.mark.parametrize("content, sentence", [
    ("{}", "rows of numbers"), ("[[1", "rows of numbers"), ("[[1, 2]]", "the model's hidden size"), ("[]", "one row"),
    (None, "in the field file")])
async def test_files_that_hold_no_embeddings(http: aiohttp.ClientSession, content: str | None, sentence: str) -> None:
    form = aiohttp.FormData()
    form.add_field("other" if content is None else "file", content or "x", filename="embeds.json")
    async with http.post("/generate_from_file", data=form) as answer:
        assert answer.status == 400 and sentence in await answer.text()


async def test_a_form_that_is_none(http: aiohttp.ClientSession) -> None:
    for kind, body in (("application/json", "{}"), ("multipart/form-data", "x"),
                       ("multipart/form-data; boundary=a", "x")):
        async with http.post("/generate_from_file", data=body, headers={"Content-Type": kind}) as answer:
            assert answer.status == 400 and "multipart/form-data" in await answer.text()


async def test_logging_is_configured_by_get_too(http: aiohttp.ClientSession) -> None:
    async with http.get("/configure_logging", json={"log_requests": False}) as answer:
        assert await answer.json() == {"success": True, "message": "Requests are not logged."}


async def test_instances_of_vertex_ai(http: aiohttp.ClientSession) -> None:
    sampling = {"max_new_tokens": 2, "ignore_eos": True}
    for instances in ([{"text": "hello"}], [{"text": "hello"}, {"text": "fox"}], [{"input_ids": [50, 51]}]):
        async with http.post("/vertex_generate", json={"instances": instances, "parameters": {
                "sampling_params": sampling}}) as answer:
            told = (await answer.json())["predictions"]
        name = next(iter(instances[0]))
        _, expected = await generate(http, **{name: [each[name] for each in instances]}, sampling_params=sampling)
        assert [each["output_ids"] for each in told] == [each["output_ids"] for each in expected]
    for body, sentence in (({"instances": []}, "instances is empty"), ({}, "instances"),
                           ({"instances": [{"text": "a"}], "parameters": {"stream": True}}, "leave stream out"),
                           ({"instances": [{"text": "a"}, {}]}, "text"), ({"instances": [{}]}, "text")):
        async with http.post("/vertex_generate", json=body) as answer:
            assert answer.status == 400 and sentence in await answer.text()

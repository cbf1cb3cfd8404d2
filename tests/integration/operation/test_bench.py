"""The bench commands as a user runs them: against a real server of the shipped model, and without one."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from baton.bench import bench_offline_throughput
from baton.common.bench import evaluation, one_batch, one_batch_server, serving
from baton.common.bench.client.stepped_engine import SteppedEngine
from baton.common.config.server import CacheArgs, ModelArgs, ScheduleArgs, ServerConfig
from baton.common.tokenizer.tokenizer import load_tokenizer
from baton.tests.helpers.harness import Server
from baton.tests.helpers.ports import free_port
from baton.tests.tinychat import exam

QUICK = ["--num-prompts", "6", "--random-input-len", "24", "--random-output-len", "5", "--disable-progress"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("bench") / "server.log"
    flags = ["server", "--model-path", "tinychat", "--device", "cpu", "--log-level", "warning"]
    started = Server("baton.launch", flags, free_port(), log).start()
    try:
        yield started.wait_ready()
        started.assert_clean(10)
    finally:
        started.stop()


def bench(server, *flags):
    """Exit code of bench_serving."""
    with pytest.raises(SystemExit) as exit:
        serving.main(["--base-url", server.url, "--request-timeout", "100", *flags])
    return exit.value.code


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_backend_tells_the_same_counts(server, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    for backend in ("baton", "openai", "openai-chat"):
        assert bench(server, *QUICK, "--backend", backend, "--random-range-ratio", "1", "--output-file", str(output),
                     "--output-details") == 0
    native, plain, chat = lines_of(output)
    for record in (native, plain, chat):
        assert record["completed"] == 6 and record["failed"] == {} and record["total_output_tokens"] == 30
        assert 0 < record["median_ttft_ms"] <= record["p99_ttft_ms"] <= record["max_e2e_latency_ms"]
        assert record["output_lens"] == [5] * 6 and record["errors"] == [""] * 6
    assert native["total_input_tokens"] == plain["total_input_tokens"] == 6 * 24 < chat["total_input_tokens"]
    told = capsys.readouterr().out
    assert told.count("6 of 6 answered") == 3 and "TTFT" in told and "failed" not in told


def test_groups_hit_the_prefix_cache_as_computed(server, tmp_path):
    output = tmp_path / "out.jsonl"
    flags = ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "2", "--gsp-prompts-per-group", "4",
             "--gsp-system-prompt-len", "64", "--gsp-question-len", "16", "--gsp-output-len", "2", "--flush-cache",
             "--tokenize-prompt", "--max-concurrency", "1", "--disable-progress", "--output-file", str(output)]
    assert bench(server, *flags) == 0 == bench(server, *flags)  # the second run begins without the first one's pages
    for record in lines_of(output):
        assert record["total_cached_tokens"] == 2 * 3 * 64 and record["cache_hit_rate"] == 0.6


def test_chats_find_their_history_in_the_cache(server, tmp_path):
    output = tmp_path / "out.jsonl"
    assert bench(server, *QUICK, "--dataset-name", "multi-turn", "--num-turns", "3", "--random-range-ratio", "1",
                 "--tokenize-prompt", "--flush-cache", "--output-file", str(output), "--output-details") == 0
    (record,) = lines_of(output)
    assert sorted(record["input_lens"]) == [24] * 2 + [24 + 29] * 2 + [24 + 58] * 2
    assert record["total_cached_tokens"] == 2 * (16 + 48)  # whole pages of what was said before


def test_a_trace_is_replayed_at_its_times(server, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in (
        {"timestamp": 5000, "input_length": 530, "output_length": 2, "hash_ids": [1, 2]},
        {"timestamp": 7000, "input_length": 520, "output_length": 2, "hash_ids": [1, 3]})))
    output = tmp_path / "out.jsonl"
    assert bench(server, "--dataset-name", "trace", "--dataset-path", str(trace), "--trace-scale", "0.5",
                 "--tokenize-prompt", "--flush-cache", "--disable-progress", "--output-file", str(output)) == 0
    (record,) = lines_of(output)
    assert record["duration"] >= 1.0 and record["total_input_tokens"] == 1050 and record["total_cached_tokens"] == 512
    assert record["mean_send_lag_ms"] is not None and "sent late" in capsys.readouterr().out


def test_one_piece_has_no_first_token_and_a_plot_is_drawn(server, tmp_path, capsys):
    plot = tmp_path / "plot.svg"
    assert bench(server, *QUICK, "--disable-stream", "--request-rate", "50", "--plot", str(plot)) == 0
    told = capsys.readouterr().out
    assert "E2E" in told and "TTFT" not in told and plot.read_text().startswith("<svg")


def test_refused_requests_are_shown_and_all_refused_is_an_error(server, capsys):
    assert bench(server, *QUICK, "--warmup-requests", "0", "--extra-request-body",
                 '{"sampling_params": {"temperature": -1}}') == 1
    told = capsys.readouterr().out
    assert "6 x HTTP 400" in told and "0 of 6 answered" in told and "temperature" in told
    assert bench(server, *QUICK, "--extra-request-body", '{"sampling_params": {"temperature": -1}}') == 2
    assert "does not answer: HTTP 400" in capsys.readouterr().err


def test_no_server_and_settings_that_make_no_sense_are_sentences(server, tmp_path, capsys):
    for flags, words in (
            (["--base-url", f"http://127.0.0.1:{free_port()}", "--ready-check-timeout-sec", "0"], "No server answers"),
            (["--goodput", "ttft"], "ttft:200"), (["--request-rate", "0"], "--request-rate"),
            (["--header", "nonsense"], "NAME=VALUE"), (["--extra-request-body", "["], "not JSON"),
            (["--output-file", str(tmp_path / "no" / "file")], "Cannot write"),
            (["--backend", "openai-chat", "--tokenize-prompt"], "sent as text"),
            (["--profile-num-steps", "3"], "need --profile"), (["--output-details"], "--output-file")):
        assert bench(server, *QUICK, "--warmup-requests", "0", *flags) == 2
        assert words in capsys.readouterr().err


def trace_of(folder):
    (found,) = folder.iterdir()
    return json.loads(gzip.decompress(found.read_bytes()))["traceEvents"]


def test_a_profile_is_a_trace_that_viewers_open(server, tmp_path, capsys):
    assert bench(server, *QUICK, "--profile", "--profile-output-dir", str(tmp_path / "traces")) == 0
    assert "The profile is in" in capsys.readouterr().out
    assert any(event.get("name", "").startswith("aten::") for event in trace_of(tmp_path / "traces"))


def test_ctrl_c_prints_what_was_measured(server):
    command = [sys.executable, "-m", "baton.common.bench.serving", "--base-url", server.url, "--num-prompts", "400",
               "--random-input-len", "8", "--random-output-len", "300", "--random-range-ratio", "1",
               "--max-concurrency", "2", "--disable-progress"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    assert "400 requests of random" in process.stdout.readline()
    deadline = time.monotonic() + 60
    while server.state()["num_running"] < 2 and time.monotonic() < deadline:  # past the warm-up, which is one
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    told, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "of 400 answered" in told and "requests have no answer" in told and "Traceback" not in errors


def test_one_batch_tells_steps_and_parts(tmp_path, capsys):
    output, traces = tmp_path / "out.jsonl", tmp_path / "traces"
    with pytest.raises(SystemExit) as exit:
        one_batch.main(["--model-path", "tinychat", "--load-format", "dummy", "--device", "cpu", "--batch-size",
                        "1", "3", "--input-len", "20", "--output-len", "4", "--repeat", "1", "--disable-progress",
                        "--output-file", str(output), "--profile", "--profile-output-dir", str(traces)])
    assert exit.value.code == 0
    first, second = lines_of(output)
    assert (first["batch_size"], second["batch_size"]) == (1, 3)
    for record in (first, second):
        assert record["prefill_latency"] > 0 and record["decode_step_ms"]["count"] == 2
        parts = record["decode_parts_ms"]
        assert set(parts) == {"attention", "GEMM", "norm", "sampling", "other", "host"} and min(parts.values()) > 0
        assert sum(parts.values()) == pytest.approx(record["decode_step_ms"]["p50"])
        assert record["host_ms"] == parts["host"] and record["prefill_parts_ms"]["GEMM"] > 0
    assert len(list(traces.iterdir())) == 4 and capsys.readouterr().out.count("decode   ms: attention") == 2


def test_one_batch_of_a_server_that_runs(server, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    with pytest.raises(SystemExit) as exit:
        one_batch_server.main(["--model", "None", "--base-url", server.url, "--batch-size", "1", "3", "--input", "20",
                               "--output", "4", "--return-logprob", "--run-name", "here", "--result-filename",
                               str(output)])
    records = lines_of(output)
    assert exit.value.code == 0 and capsys.readouterr().out.count("\n") == 3
    assert [(r["run_name"], r["batch_size"], r["input_len"], r["output_len"]) for r in records] == [
        ("here", 1, 20, 4), ("here", 3, 20, 4)]
    for r in records:
        assert 0 < r["last_ttft"] < r["latency"]
        assert r["overall_throughput"] == pytest.approx(r["batch_size"] * 24 / r["latency"])
        assert r["input_throughput"] == pytest.approx(r["batch_size"] * 20 / r["last_ttft"])
    with pytest.raises(SystemExit) as exit:
        one_batch_server.main(["--model", "None", "--base-url", server.url, "--input", "999999", "--skip-warmup"])
    assert exit.value.code == 2 and "does not answer 999999" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_a_sentence(tmp_path, capfd):
    """The command's own server; its weights are missing."""
    with pytest.raises(SystemExit) as exit:
        one_batch_server.main(["--model-path", str(tmp_path), "--device", "cpu", "--port", str(free_port())])
    assert exit.value.code == 2 and "did not start (exit status" in capfd.readouterr().err


@pytest.mark.parametrize("flags", [
    ["--task", "mmlu", "--data-path", "mmlu", "--cloze"], ["--task", "gsm8k", "--data-path", "gsm8k.jsonl"],
    ["--task", "hellaswag", "--data-path", "hellaswag.jsonl"]])
def test_tinychat_passes_its_exams(server, tmp_path, flags):
    output = tmp_path / "out.jsonl"
    flags[flags.index("--data-path") + 1] = str(exam.FOLDER / flags[flags.index("--data-path") + 1])
    with pytest.raises(SystemExit) as exit:
        evaluation.main(["--base-url", server.url, "--num-shots", "0", "--apply-chat-template", "--num-questions", "12",
                         "--parallel", "4", "--output-file", str(output), "--disable-progress", *flags])
    (record,) = lines_of(output)
    assert exit.value.code == 0 and record["failed"] == 0 and record["accuracy"] > 0.9


def test_the_correctness_test_shows_answers(capsys):
    with pytest.raises(SystemExit) as exit:
        one_batch.main(["--model-path", "tinychat", "--device", "cpu", "--correct", "--output-len", "8"])
    told = capsys.readouterr().out
    assert exit.value.code == 0 and told.count("The capital of France is': ") == 1 and "four" in told
    engine = SteppedEngine(ServerConfig(ModelArgs("tinychat", device="cpu"), CacheArgs(max_total_tokens=512),
                                        ScheduleArgs()))
    try:
        tokenizer = load_tokenizer("tinychat")
        chat = [tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": question}], tools=None,
                                                       continue_final_message=False, options={}),
                                 add_special_tokens=False)
                for question in ("What is the capital of France?", "What is 20 + 30?")]
        assert [tokenizer.decode(ids, skip_special_tokens=True).split()[0] for ids in engine.complete(chat, 6)] == [
            "Paris", "50"]
    finally:
        engine.close()


def test_one_batch_on_two_ranks(tmp_path, capfd):
    """In a process of its own: ranks join groups of torch.distributed."""
    output = tmp_path / "out.jsonl"
    flags = ["--model-path", "tinychat", "--load-format", "dummy", "--device", "cpu", "--tp", "2", "--batch-size", "3",
             "--input", "20", "--output", "4", "--repeat", "1", "--disable-progress", "--output-file", str(output)]
    code = f"from baton.bench import bench_one_batch\nif __name__ == '__main__': bench_one_batch({flags})"
    (tmp_path / "run.py").write_text(code)
    assert subprocess.run([sys.executable, str(tmp_path / "run.py")], timeout=240).returncode == 0
    (record,) = lines_of(output)
    assert record["batch_size"] == 3 and record["decode_step_ms"]["count"] > 0 and record["decode_parts_ms"]["GEMM"] > 0
    assert "2 ranks" in capfd.readouterr().out


@pytest.mark.parametrize("flags, words", [
    (["--batch-size", "0"], "--batch-size"), (["--batch-size", "4", "--max-total-tokens", "64"], "--max-total-tokens"),
    (["--input-len", "9999999"], "context of"), (["--pp-size", "2"], "bench_one_batch_server starts one")])
def test_one_batch_that_does_not_fit_is_a_sentence(flags, words, capsys):
    with pytest.raises(SystemExit) as exit:
        one_batch.main(["--model-path", "tinychat", "--load-format", "dummy", "--device", "cpu", "--input-len", "20",
                        "--output-len", "4", "--repeat", "1", *flags])
    assert exit.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("pair", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_offline_throughput(tmp_path, capsys, pair):
    output, traces = tmp_path / "out.jsonl", tmp_path / "traces"
    with pytest.raises(SystemExit) as exit:
        bench_offline_throughput([
            "--model-path", "tinychat", "--device", "cpu", "--dataset-name", "generated-shared-prefix",
            "--gsp-num-groups", "1", "--gsp-prompts-per-group", "3", "--gsp-system-prompt-len", "32",
            "--gsp-question-len", "8", "--gsp-output-len", "3", "--max-concurrency", "1", "--disable-progress",
            "--output-file", str(output), "--profile", "--profile-output-dir", str(traces),
            *(["--pair"] if pair else [])])
    assert exit.value.code == 0
    (record,) = lines_of(output)
    assert record["successful_requests"] == 3 and record["total_output_tokens"] == 9 and record["pair"] == pair
    assert record["total_cached_tokens"] == 2 * 32 and record["output_throughput"] > 0
    assert len(list(traces.iterdir())) == 1 + pair
    assert "3 of 3 answered" in capsys.readouterr().out

"""SGLang's command lines of ``bench_serving``: taken, mapped or refused with a sentence."""

from __future__ import annotations

import json

import pytest

from baton.common.bench.serving_args import BenchServing
from baton.common.bench.sglang_flags import BENCH_SERVING_FLAGS
from baton.common.config.cli import parse


def read(*argv):
    return parse(BenchServing, argv, foreign=BENCH_SERVING_FLAGS, prog="bench_serving", description="")


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 1, "output_length": 1}))
    return ["--dataset-name", "mooncake", "--dataset-path", str(path)]


def test_names_may_be_abbreviated_and_have_underscores():
    config = read("--num-prompt", "30", "--random-input", "5", "--random_output_len=6", "--max-conc", "2")
    assert (config.dataset.num_prompts, config.dataset.random_input_len, config.dataset.random_output_len,
            config.load.max_concurrency) == (30, 5, 6, 2)


def test_what_is_so_anyway_is_reported(capsys, trace):
    config = read(*trace, "--use-trace-timestamps", "--pd-separated", "--profile", "--profile-prefill-url", "http://a",
                  "http://b", "--mooncake-slowdown-factor", "2", "--mooncake-num-rounds", "4")
    assert config.load.request_rate is None and config.profile.profile
    assert config.dataset.trace_scale == 2 and config.dataset.mooncake_num_rounds == 4
    said = capsys.readouterr().err
    assert all(name in said for name in ("--use-trace-timestamps", "--pd-separated", "--profile-prefill-url"))
    assert read(*trace, "--use-trace-timestamps", "true").load.request_rate is None


def test_the_template_of_chats_is_the_server_s(capsys):
    file = ["--dataset-name", "sharegpt", "--dataset-path", __file__, "--apply-chat-template"]
    assert not read("--backend", "vllm-chat", *file).dataset.apply_chat_template
    assert capsys.readouterr().err == "bench_serving: --apply-chat-template is not needed here.\n"
    assert read("--backend", "vllm", *file).dataset.apply_chat_template and not capsys.readouterr().err


def test_other_servers_of_openai_s_api():
    assert read("--backend", "lmdeploy-chat").target.backend == "openai-chat"
    assert read("--backend=sglang-native", "--return-logprob").target.return_logprob


@pytest.mark.parametrize("argv, words", [
    (["--backend", "trt"], "--backend trt is not supported"),
    (["--apply-chat-template"], "are for --dataset-name sharegpt"),
    (["--dataset-name", "mmmu"], "images are not sent"),
    (["--dataset-name", "custom"], "ShareGPT"),
    (["--image-count", "2"], "images are not sent"),
    (["--lora-name", "a", "b"], "merge the adapter"),
    (["--plot-throughput"], "--plot FILE"),
    (["--use-trace-timestamps"], "needs --dataset-name mooncake"),
])
def test_what_is_not_there_is_a_sentence(argv, words, capsys):
    with pytest.raises(SystemExit) as exit:
        read(*argv)
    assert exit.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("more, words", [
    (["--use-trace-timestamps", "--request-rate", "4"], "exclude each other"),
    (["--use-trace-timestamps", "false"], "no value but true")])
def test_times_of_a_trace_and_a_rate_exclude_each_other(trace, more, words, capsys):
    with pytest.raises(SystemExit):
        read(*trace, *more)
    assert words in capsys.readouterr().err

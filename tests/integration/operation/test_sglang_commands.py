"""SGLang's documents' commands with the shipped model in place of theirs: what they start, or the sentence that says
what they lack here. Their flags alone: tests/common/config/test_sglang_server_flags.py."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from baton.common.api.errors import ConfigError
from baton.common.bench.offline_args import BenchOffline
from baton.common.bench.one_batch_args import BenchOneBatch
from baton.common.bench.one_batch_server_args import BenchOneBatchServer
from baton.common.bench.serving_args import BenchServing
from baton.common.bench.sglang_flags import BENCH_SERVING_FLAGS
from baton.common.config.cli import build, parse, read_values
from baton.common.config.server import ServerConfig
from baton.common.config.server.sglang_flags import SGLANG_FLAGS
from baton.common.models.registry import load_model_spec
from baton.common.runner import preflight
from baton.launch import ClusterConfig, copies_of, plan_cluster
from baton.router.config import RouterConfig
from baton.router.sglang_flags import translate
from baton.tests.helpers.harness import Server, post_json
from baton.tests.helpers.ports import free_ports


def lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]


SERVERS = [line for line in lines_of(Path(__file__).parents[2] / "common/config/sglang_commands.txt")
           if " => " not in line]
TOOLS = lines_of(Path(__file__).parent / "sglang_tool_commands.txt")
OUR_MODELS = {"EAGLE": "tinychat-nextn", "EAGLE3": "tinychat-eagle3", "NEXTN": "tinychat-nextn"}
GPU_FLAGS = re.compile(r"--attention-backend (flashinfer|fa3|triton|flashmla)|--device cuda")
QUESTION = {"model": "default", "temperature": 0, "messages": [{"role": "user",
                                                                "content": "What is the capital of Italy?"}]}


# ---------------------------------------------------------------------- up to the ranks


def with_our_model(line: str, folder: Path) -> list[str]:
    """The command's flags for the shipped model, which two ranks can share, on this host."""
    argv = shlex.split(re.sub(r"(--tp(?:-size)?[ =])\d+", r"\g<1>2", line).replace("--dp 8", "--dp 2")
                       .replace("int4wo-128", "int4wo-64")  # its MLP has 704 columns
                       .replace("--dp-size 8", "--dp-size 2").replace("--context-length 8192", "--context-length 4096"))
    draft = OUR_MODELS.get(argv[argv.index(next(flag for flag in argv if flag.startswith("--speculative-algo"))) + 1]
                           ) if "--speculative-algo" in line else None
    meeting = f"127.0.0.1:{free_ports(2)[0]}"  # the port above is used, too
    for flag, ours in (("--model", "tinychat"), ("--model-path", "tinychat"), ("--speculative-draft-model-path", draft),
                       ("--dist-init-addr", meeting), ("--nccl-init", meeting), ("--nccl-init-addr", meeting),
                       ("--chat-template", str(folder / "chat.jinja"))):
        if flag in argv and not argv[argv.index(flag) + 1].startswith(("chatml", "llava")):
            argv[argv.index(flag) + 1] = ours
    if draft is not None and "--speculative-draft-model-path" not in argv:  # theirs are in the model's checkpoint
        argv += ["--speculative-draft-model-path", draft]
    (folder / "chat.jinja").write_text("{{ messages[0].content }}")
    return argv


@pytest.mark.parametrize("line", SERVERS)
def test_servers_pass_what_is_checked_before_they_load(line, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(preflight, "_GPU_FILES", ())
    values = read_values(ServerConfig, with_our_model(line, tmp_path), prog="launch_server", description="",
                         foreign=SGLANG_FLAGS)
    if (copies := copies_of(values)) is not None:
        assert len(plan_cluster(copies, 0).servers) == 2
        return
    config = build(ServerConfig, values)
    lacking = None
    try:
        preflight.preflight(config, load_model_spec(config.model))
    except ConfigError as error:
        lacking = str(error)
    if GPU_FLAGS.search(line):
        assert lacking is not None and "needs a GPU" in lacking
    elif "--disaggregation-ib-device" in line:
        assert lacking is None or "needs the package mooncake-transfer-engine" in lacking
    elif "--quantization modelopt" in line:  # the model in place of theirs is not quantized
        assert lacking is not None and "is for checkpoints of modelopt" in lacking
    else:
        assert lacking is None


CLASSES = {"launch_router": RouterConfig, "launch_cluster": ClusterConfig, "bench_one_batch": BenchOneBatch,
           "bench_one_batch_server": BenchOneBatchServer, "bench_offline_throughput": BenchOffline,
           "bench_serving": BenchServing}


@pytest.mark.parametrize("line", TOOLS)
def test_flags_of_the_router_and_of_benchmarks(line, capsys):
    """``command`` or ``command => part of the sentence with which it is refused``."""
    command, _, sentence = line.partition(" => ")
    name, *argv = shlex.split(command)
    foreign = BENCH_SERVING_FLAGS if name == "bench_serving" else SGLANG_FLAGS
    argv = translate(argv) if name == "launch_router" else argv
    if not sentence:
        parse(CLASSES[name], argv, prog=name, description="", foreign=foreign)
        return
    with pytest.raises(SystemExit) as ended:
        parse(CLASSES[name], argv, prog=name, description="", foreign=foreign)
    assert ended.value.code == 2 and sentence in capsys.readouterr().err.splitlines()[-1]


def test_number_of_commands():
    assert len(SERVERS) + len(TOOLS) >= 58


# ---------------------------------------------------------------------- to the first answer


def status_of(url: str) -> int:
    """The status of a GET; 0 where nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def assert_answers(url: str) -> None:
    status, told = post_json(url + "/v1/chat/completions", QUESTION)
    assert status == 200 and told["choices"][0]["message"]["content"] == "Rome", told


def test_a_pair_of_servers_and_their_router(tmp_path):
    prefill_port, bootstrap, decode_port, router_port = free_ports(4)
    common = ["--model-path", "tinychat", "--device", "cpu", "--log-level", "warning", "--trust-remote-code",
              "--enable-metrics"]
    prefill = Server("baton.launch_server", [*common, "--disaggregation-mode", "prefill",
                                             "--disaggregation-bootstrap-port", str(bootstrap)], prefill_port,
                     tmp_path / "prefill.log")
    decode = Server("baton.launch_server", [*common, "--disaggregation-mode", "decode"], decode_port,
                    tmp_path / "decode.log")
    router = Server("baton.launch_router", ["--pd-disaggregation", "--prefill", prefill.url, str(bootstrap), "--decode",
                                            decode.url], router_port, tmp_path / "router.log")
    servers = (prefill, decode, router)
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
        assert_answers(router.url)
        for server in reversed(servers):
            assert server.stop() == 0, repr(server)
    finally:
        for server in servers:
            if server.process is not None and server.process.poll() is None:
                server.kill()


def test_whole_copies(tmp_path):
    """The router, which has the server's address, starts when its workers answer; all end together."""
    port = free_ports(3)[0]
    server = Server("baton.launch_server", ["--model-path", "tinychat", "--device", "cpu", "--dp", "2", "--log-dir",
                                            str(tmp_path)], port, tmp_path / "log").start()
    workers = [f"http://127.0.0.1:{port + index}" for index in (1, 2)]
    try:
        deadline = time.monotonic() + 120
        while not (status := status_of(server.url + "/v1/models")):
            assert time.monotonic() < deadline and server.process.poll() is None, repr(server)
            time.sleep(0.02)
        assert status in (200, 503) and [status_of(url + "/health") for url in workers] == [200, 200]
        server.wait_ready()
        assert [status_of(url + "/v1/models") for url in (server.url, *workers)] == [200] * 3
        for _ in range(2):
            assert_answers(server.url)
        parts = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop() == 0, repr(server)
        assert not psutil.wait_procs(parts, timeout=10)[1]
    finally:
        server.kill()


@pytest.mark.parametrize("name, flag", [
    ("launch_server", "--tp-size"), ("launch_router", "--worker-urls"), ("launch_prefill", "--tp-size"),
    ("launch_decode", "--tp-size"), ("launch_cluster", "--dp-size"), ("bench_serving", "--request-rate"),
    ("bench_one_batch", "--batch-size"), ("bench_one_batch_server", "--base-url"),
    ("bench_offline_throughput", "--num-prompts")])
def test_programs_are_modules_too(name, flag):
    done = subprocess.run([sys.executable, "-m", f"baton.{name}", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and flag in done.stdout, done.stderr

"""sglang.launch_server's command lines: each flag works, is always on, is another flag here, or is refused with a
sentence."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path

import pytest

from baton.common.api.errors import ConfigError
from baton.common.config.cli import _flags, build, parse
from baton.common.config.foreign_flags import Automatic, ForeignFlags, Mapped, Refused
from baton.common.config.server import ServerConfig
from baton.common.config.server.sglang_flags import SGLANG_FLAGS
from baton.docs.generate import sglang_names
from baton.launch import ClusterConfig, copies_of

OWN = {spelling for item in _flags(ServerConfig) for spelling in item.spellings}
NAMES = sglang_names()
COMMANDS = [line for line in (Path(__file__).parent / "sglang_commands.txt").read_text().splitlines()
            if not line.startswith("#")]


def read(*argv, cls=ServerConfig):
    return parse(cls, argv, prog="launch_server", description="", foreign=SGLANG_FLAGS)


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as ended:
        read(*argv)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("launch_server: error: ")
    return lines[-1].removeprefix("launch_server: error: ")


# ---------------------------------------------------------------------- the list of names


def outcome(name):
    flag = SGLANG_FLAGS.flags.get(name)
    if flag is None:
        return "ours" if name in OWN else "unknown"
    return {Automatic: "automatic", Mapped: "mapped", Refused: "refused"}[type(flag)]


def test_every_name_has_the_outcome_that_is_written_down():
    assert {name: outcome(name) for name in NAMES} == NAMES
    assert len(NAMES) == 585 and "unknown" not in NAMES.values()
    assert SGLANG_FLAGS.flags.keys() - NAMES.keys() == {"--oltp-traces-endpoint"}, "a name that SGLang does not have"


def test_flags_of_ours_are_in_the_table_only_to_change_values():
    assert OWN & SGLANG_FLAGS.flags.keys() == {"--moe-a2a-backend", "--disaggregation-ib-device"}
    assert SGLANG_FLAGS.values.keys() <= OWN


def by_type(kind):
    return sorted(name for name, flag in SGLANG_FLAGS.flags.items() if isinstance(flag, kind))


@pytest.mark.parametrize("name", by_type(Automatic))
def test_automatic_flags_are_dropped_with_a_line(name, capsys):
    flag = SGLANG_FLAGS.flags[name]
    values = {"0": [], "1": ["7"], "*": ["7", "8"]}[flag.count]
    assert read("--model-path", "m", name, *values, "--tp", "2") == read("--model-path", "m", "--tp", "2")
    assert capsys.readouterr().err == f"launch_server: {name} is not needed: {flag.reason}.\n"


@pytest.mark.parametrize("name", by_type(Refused))
def test_refused_flags_say_why(name, capsys):
    flag = SGLANG_FLAGS.flags[name]
    for argv in ([name, "x"], [f"{name}=x"]):
        sentence = refused(capsys, "--model-path", "m", *argv)
        assert sentence.startswith(name) and flag.reason in sentence and sentence.count("\n") == 0
    for value in flag.harmless:
        assert read("--model-path", "m", name, value) == read("--model-path", "m")


@pytest.mark.parametrize("name, values", [(name, values) for name, values in sorted(SGLANG_FLAGS.values.items())])
def test_values_are_translated_or_refused(name, values, capsys):
    extra = ["--enable-eplb", "--tp", "2", "--ep", "2"] if name == "--eplb-algorithm" else []
    for theirs, ours in values.to.items():
        for form in ([name, theirs], [f"{name}={theirs}"]):
            assert read("--model-path", "m", *extra, *form) == read("--model-path", "m", *extra, name, ours)
            assert capsys.readouterr().err == f"launch_server: {name} {theirs} is {name} {ours} here.\n"
    for theirs, reason in values.refused.items():
        assert refused(capsys, "--model-path", "m", name, theirs) == f"{name} {theirs} is not supported: {reason}."


@pytest.mark.parametrize("theirs, ours", [
    ("--prefill-attention-backend fa3", "--attention-backend flashinfer"),
    ("--enable-ep-moe --tp 4", "--ep-size 4 --tp 4"),
    ("--enable-ep-moe --tp 4 --ep 2", "--tp 4 --ep 2"),
    ("--enable-deepep-moe --tp 4", "--ep-size 4 --tp 4 --moe-a2a-backend alltoall"),
    ("--moe-a2a-backend deepep --tp 4 --dp 4 --enable-dp-attention",
     "--ep-size 4 --tp 4 --dp 4 --enable-dp-attention --moe-a2a-backend peer"),
    ("--moe-a2a-backend alltoall --tp 4 --ep 4", "--moe-a2a-backend=alltoall --tp 4 --ep 4"),
    ("--max-micro-batch-size 3 --pp-size 2", "--pp-max-micro-batch-size 3 --pp-size 2"),
    ("--max-micro-batch-size 3", ""),
    ("--torchao-config int8dq", "--quantization w8a8_int8"), ("--torchao-config=", ""),
    ("--torchao-config int4wo-128", "--quantization int4wo-128"),
    ("--torchao-config fp8dq-per_row", "--quantization fp8"),
    ("""--kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5560"}'""", "--kv-events-port 5560"),
    ("""--kv-events-config '{"publisher": "null"}'""", ""),
    ("--tbo-token-distribution-threshold 0.48", ""),
    ("--disaggregation-enable-kv-checksum", "--kv-checksum full"),
    ("--enforce-disable-flashinfer-allreduce-fusion", "--disable-custom-all-reduce"),
    ("--cuda-graph-backend-decode disabled", "--disable-decode-cuda-graph"), ("--cuda-graph-backend-decode full", ""),
    ("--cuda-graph-backend-prefill disabled", "--disable-piecewise-cuda-graph"),
    ("--cuda-graph-backend-prefill breakable", ""),
    ("--oltp-traces-endpoint localhost:4317", "--otlp-traces-endpoint localhost:4317"),
    ("--disaggregation-ib-device mlx5_0",
     "--disaggregation-ib-device mlx5_0 --disaggregation-transfer-backend mooncake"),
    ("--attn-dp-size 2 --tp 2", "--enable-dp-attention --dp-size 2 --tp 2"), ("--attn-dp-size 1", ""),
    ("--cuda-graph-max-bs-decode 8", "--cuda-graph-max-bs 8"),
    ("--cuda-graph-max-bs-prefill 64", "--piecewise-cuda-graph-max-tokens 64"),
    ("--cuda-graph-bs-decode 1 2 --tp 2", "--cuda-graph-bs 1 2 --tp 2"),
    ("--cuda-graph-bs-prefill 64", "--piecewise-cuda-graph-tokens 64"),
    ("--disable-prefill-cuda-graph", "--disable-piecewise-cuda-graph"),
    ("--detokenizer-worker-num 2", "--tokenizer-worker-num 2"),
    ("--detokenizer-worker-num 2 --tokenizer-worker-num 3", "--tokenizer-worker-num 3"),
    ("--hicache-mem-layout page_first_direct", ""), ("--enable-hicache", "--enable-hierarchical-cache"),
    ("--disaggregation-decode-enable-offload-kvcache", "--enable-hierarchical-cache"),
    ("--disable-priority-preemption", ""),
    ("--disable-priority-preemption --enable-priority-scheduling",
     "--enable-priority-scheduling --priority-scheduling-preemption-threshold 4294967296"),
    ("--constrained-json-max-whitespace-cnt 2", r"--constrained-json-whitespace-pattern '[ \t\n\r]{0,2}'"),
])
def test_mapped_flags_are_ours(theirs, ours, capsys):
    assert read("--model-path", "m", *shlex.split(theirs)) == read("--model-path", "m", *shlex.split(ours))


def test_every_mapped_flag_has_a_case():
    cases = " ".join(mark.args[1][i][0] for mark in test_mapped_flags_are_ours.pytestmark
                     for i in range(len(mark.args[1])))
    aliases = {"--attention-data-parallel-size"}
    assert [name for name in by_type(Mapped) if name not in cases.split() and name not in aliases] == []


@pytest.mark.parametrize("flags, sentence", [
    ("--kv-events-config zmq", "takes a JSON object"), ("--kv-events-config []", "takes a JSON object"),
    ("--attn-dp-size two", "dp_size takes a value of type int"), ("--nccl-port", "takes one value"),
    ("--torchao-config fp8wo", "fp8wo is not supported: use int8dq, "),
    ("--torchao-config int8wo --quantization fp8", "both quantize weights"),
    ("--max-micro-batch-size", "takes one value")])
def test_values_that_cannot_be(flags, sentence, capsys):
    assert sentence in refused(capsys, "--model-path", "m", "--pp-size", "2", *flags.split())


# ---------------------------------------------------------------------- spellings


def test_spellings(capsys):
    config = read("--model_path", "m", "--tp_size=2", "--mem-frac=0.5", "--speculative-algo", "NGRAM")
    assert config.parallel.tp_size == 2 and config.cache.mem_fraction_static == 0.5
    assert config.speculative.speculative_algorithm == "NGRAM"
    assert read("--model-path", "m", "--enable_metrics") == read("--model-path", "m")
    assert "there is no flag --disable-cuda" in refused(capsys, "--model-path", "m", "--disable-cuda")
    assert "there is no flag --enable_nothing" in refused(capsys, "--model-path", "m", "--enable_nothing")


@pytest.mark.parametrize("suffix, write", [("yaml", lambda content: "\n".join(
    f"{name}: {json.dumps(value)}" for name, value in content.items())), ("json", json.dumps)])
def test_files_have_the_same_names(tmp_path, capsys, suffix, write):
    file = tmp_path / f"c.{suffix}"
    file.write_text(write({
        "model": "m", "tensor-parallel-size": 4, "enable_metrics": True, "enable-lora": False, "chat-template": None,
        "enable-deepep-moe": True, "dtype": "half", "cuda-graph-bs": [1, 2], "nccl-port": 7, "kv_events_config": {
            "publisher": "zmq", "endpoint": "tcp://*:5560"}, "log_requests": True, "cuda_graph_max_bs": 2}))
    expected = read(*"--model-path m --tp 4 --ep 4 --moe-a2a-backend alltoall --dtype float16 --cuda-graph-bs 1 2 "
                    "--kv-events-port 5560 --log-requests --cuda-graph-max-bs 2".split())
    assert read("--config", str(file)) == expected
    assert read("--config", str(file), "--ep", "2", "--moe-a2a-backend", "none").parallel.ep_size == 2
    file.write_text(write({"model": "m", "enable-lora": True}))
    assert refused(capsys, "--config", str(file)) == (
        "--enable-lora is not supported: adapters are not supported; merge the adapter into the checkpoint.")
    file.write_text(write({"model": "m", "nccl-port": [1, 2]}))
    assert "takes one value" in refused(capsys, "--config", str(file))


def test_keywords_of_an_engine_are_the_same(capsys):
    assert build(ServerConfig, {"model_path": "m", "enable_metrics": True, "dtype": "half", "tp": 2},
                 foreign=SGLANG_FLAGS) == read("--model-path", "m", "--dtype", "float16", "--tp", "2")
    with pytest.raises(ConfigError, match="--enable-lora is not supported"):
        build(ServerConfig, {"model_path": "m", "enable_lora": True}, foreign=SGLANG_FLAGS)


def test_help_lists_our_flags_alone(capsys):
    with pytest.raises(SystemExit):
        read("--help")
    shown = capsys.readouterr().out
    assert "--enable-p2p-check" not in shown and "--lora-paths" not in shown and "--tp-size" in shown


def test_a_flag_that_a_command_lacks_is_named(capsys):
    table = ForeignFlags({"--x": Mapped(lambda values, ours: {"nothing": 1}, "--nothing")})
    with pytest.raises(SystemExit):
        parse(ServerConfig, ["--model-path", "m", "--x"], prog="p", description="", foreign=table)
    assert "--x is not for this command, which has no --nothing" in capsys.readouterr().err


# ---------------------------------------------------------------------- whole copies


def test_copies_behind_a_router():
    values = {"model_path": "m", "tp_size": 2, "host": "0.0.0.0", "port": 9, "dp_size": 2,
              "load_balance_method": "shortest_queue", "disaggregation_mode": "null", "nnodes": 1}
    copies = copies_of(values)
    assert copies.roles == ["null", "null"] and copies.servers.parallel.tp_size == 2
    assert (copies.cluster.host, copies.cluster.port, copies.cluster.policy) == ("0.0.0.0", 9, "least_loaded")
    assert copies_of({"model_path": "m", "dp_size": 2}).cluster.policy == "cache_aware"
    for other in ({"dp_size": 1}, {"enable_dp_attention": True}, {"disaggregation_mode": "prefill"}, {"nnodes": 2}):
        assert copies_of({**values, **other}) is None


# ---------------------------------------------------------------------- commands


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_of_the_documents(line, capsys):
    """``flags`` or ``flags => part of the sentence with which they are refused``."""
    command, _, sentence = line.partition(" => ")
    argv = shlex.split(command)
    if sentence:
        assert sentence in refused(capsys, *argv)
    elif "--enable-dp-attention" not in argv and {"--dp", "--dp-size"} & {*argv}:
        values = [word for word in argv if word not in ("--config",)]
        assert read(*values, cls=ClusterConfig).cluster.dp_size > 1
    else:
        read(*argv)


def test_number_of_commands():
    assert len(COMMANDS) >= 58
    assert Counter(" => " in line for line in COMMANDS)[False] > 40

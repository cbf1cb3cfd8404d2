"""Command lines derived from dataclasses."""

import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import pytest

import baton
from baton.common.api.errors import ConfigError
from baton.common.config.cli import build, flag, parse, to_argv
from baton.common.config.server import ServerConfig
from baton.common.serving.context.request_log import RequestLog


@dataclass(frozen=True)
class Inner:
    size: int = flag(4, help="a size")
    name: str | None = flag(None, help="a name", names=("--nickname",))

    def __post_init__(self):
        if self.size < 0:
            raise ConfigError("--size must be 0 or more.")


@dataclass(frozen=True)
class Outer:
    inner: Inner
    kind: Literal["a", "b"] = flag("a", help="a kind")
    urls: tuple[str, ...] = flag((), help="URLs")
    prefill: tuple[tuple[str, ...], ...] = flag((), help="URL [PORT]", repeat=True)
    fast: bool = flag(False, help="be fast")
    share: float = flag(0.5, help="a share")
    checks: bool = flag(True, help="check")


def read(*argv):
    return parse(Outer, argv, prog="prog", description="")


def refused(capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        read(*argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_defaults_and_flags():
    assert read() == Outer(Inner())
    config = read("--nickname", "n", "--size", "7", "--urls", "u", "v", "--prefill", "p", "1", "--prefill", "q",
                  "--fast", "--no-checks", "--kind", "b")
    assert config == Outer(Inner(7, "n"), "b", ("u", "v"), (("p", "1"), ("q",)), True, checks=False)


def test_a_configuration_survives_its_own_command_line():
    config = Outer(Inner(7, "n"), "b", ("u", "v"), (("p", "1"), ("q",)), True, checks=False)
    assert read(*to_argv(config)) == config
    assert to_argv(Outer(Inner())) == []
    server = parse(ServerConfig, ["--model-path", "m", "--tp", "2", "--disable-radix-cache"], prog="p", description="")
    assert parse(ServerConfig, to_argv(server), prog="p", description="") == server


def test_yaml_file_and_flags_win(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("size: 5\nkind: b\nprefill: [[p, 1], q]\nurls: [u]\nchecks: false\n")
    config = read("--config", str(file), "--size", "6")
    assert config == Outer(Inner(6), "b", ("u",), (("p", "1"), ("q",)), False, checks=False)


@pytest.mark.parametrize("content, part", [
    ("sizes: 5", "no flag"), ("size: big", "type int"), ("size: true", "int"), ("kind: c", "one of a, b"),
    ("- 1", "mapping"), ("share: .nan", "not nan"), ("{", "YAML"), ("fast: 3", "true or false")])
def test_wrong_yaml_is_one_sentence(tmp_path, capsys, content, part):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    message = refused(capsys, "--config", str(file))
    assert part in message and message.count("\n") == 1


def test_wrong_flags_are_one_sentence(capsys):
    assert "--size must be 0 or more" in refused(capsys, "--size", "-1")
    assert "Cannot read" in refused(capsys, "--config", "/nowhere.yaml")
    assert "share takes a number, not nan" in refused(capsys, "--share", "nan")
    with pytest.raises(SystemExit):
        parse(ServerConfig, [], prog="p", description="")
    assert "--model-path is required" in capsys.readouterr().err


@pytest.mark.parametrize("values, words", [({"size": "x"}, "size takes a value of type int"), ({"kind": "c"}, "one of"),
                                            ({"fast": "yes"}, "true or false"), ({"sizes": 1}, "no sizes")])
def test_values_of_a_script_are_checked_as_flags_are(values, words):
    with pytest.raises(ConfigError, match=words):
        build(Outer, values)
    assert build(Outer, {"size": 7, "urls": ("u",), "prefill": [("p", 1)]}) == read(
        "--size", "7", "--urls", "u", "--prefill", "p", "1")


@pytest.mark.parametrize("flags, words", [
    ("--context-length 0", "must be 1 or more"), ("--num-layer-groups 0", "must be 1 or more"),
    ("--cuda-graph-bs 1 -1", "must be 1 or more"), ("--base-gpu-id -1", "must be 0 or more"),
    ("--random-seed 99999999999999999999", "64 bits"),
    ("--peer-timeout 0", "above 0"), ("--kv-transfer-timeout -1", "above 0"), ("--request-timeout 0", "above 0"),
    ("--disaggregation-bootstrap-timeout 0", "above 0"),
    ("--disaggregation-bootstrap-port 0 --disaggregation-mode prefill", "65535"),
    ("--port 70000", "65535"), ("--shutdown-grace-secs -1", "must be 0 or more"),
    ("--max-queued-requests -1", "must be 0 or more")])
def test_numbers_that_cannot_be_are_refused(flags, words, capsys):
    with pytest.raises(SystemExit):
        parse(ServerConfig, ["--model-path", "m", *flags.split()], prog="p", description="")
    message = capsys.readouterr().err
    assert flags.split()[0] in message and words in message


def helped(capsys, *argv, cls=Outer):
    with pytest.raises(SystemExit) as end:
        parse(cls, argv, prog="prog", description="Does it.", defaults={"name": "set 5%"})
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_has_a_group_for_each_part_and_tells_every_default(capsys):
    text = " ".join(helped(capsys, "--help").split())
    assert text.startswith("usage: prog [--FLAG [VALUE] ...] Does it. options:")
    options, inner = text.split(" inner: ")
    assert "--size SIZE a size (default: 4)" in inner and "--size" not in options
    assert "a name (default: set 5%)" in inner and "be fast (default" not in options and "(default: 0.5)" in options
    server = helped(capsys, "--help", cls=ServerConfig)
    assert server.startswith("usage: prog --model-path MODEL_PATH [--FLAG [VALUE] ...]\n\n")
    told = " ".join(server.split())
    assert "seed of dummy weights and of unseeded sampling (default: 0)" in told and "(required)" in told
    groups = [line[:-1] for line in server.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert groups[:4] == ["options", "model", "cache", "schedule"] and "data parallel" in groups


@pytest.mark.parametrize("flags, sentence", [
    (["--sise", "3"], "there is no flag --sise (did you mean --size?); see --help."),
    (["--qqq=3"], "there is no flag --qqq; see --help."), (["stray"], "'stray' belongs to no flag; see --help."),
    (["--size", "x"], "argument --size: invalid int value: 'x'; see --help.")])
def test_unknown_words_are_one_line(capsys, flags, sentence):
    assert refused(capsys, *flags) == f"prog: error: {sentence}\n"


def test_words_in_another_order_are_found(capsys):
    with pytest.raises(SystemExit):
        parse(ServerConfig, ["--model-path", "m", "--static-mem-fraction", "0.8"], prog="p", description="")
    assert "did you mean --mem-fraction-static?" in capsys.readouterr().err


def test_version_and_completion(capsys, monkeypatch):
    assert helped(capsys, "--version") == f"Baton {baton.__version__}\n"
    script = helped(capsys, "--print-completion", "bash")
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert "--checks" in script and "prog" in script
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "[completion]" in refused(capsys, "--print-completion", "bash")


def test_a_dump_folder_that_cannot_be_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give another --crash-dump-folder"):
        RequestLog(None, tmp_path / "file")
    RequestLog(None, tmp_path / "new")
    assert (tmp_path / "new").is_dir()


def test_the_backend_for_tests_is_not_shown(capsys):
    with pytest.raises(SystemExit):
        parse(ServerConfig, ["--help"], prog="p", description="")
    assert not re.search(r"--disaggregation-transfer-backend\s+{[^}]*fake", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        parse(ServerConfig, ["--model-path", "m", "--disaggregation-transfer-backend", "x"], prog="p", description="")
    assert "fake" not in capsys.readouterr().err
    config = parse(ServerConfig, ["--model-path", "m", "--disaggregation-transfer-backend", "fake"], prog="p",
                   description="")
    assert config.disaggregation.disaggregation_transfer_backend == "fake"

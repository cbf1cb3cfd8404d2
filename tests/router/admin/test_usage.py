"""The command takes every form of every flag that --help shows."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from baton.common.bench.serving_args import BenchServing
from baton.common.config.cli import _flags, parse
from baton.router.config import RouterConfig

ROW = re.compile(r"^  (?:-\w[^-]*, )?(--[a-z].*?)(?:  .*)?$", re.MULTILINE)
TOKEN = re.compile(r"\{[^}]*\}|\[|\]|[^\s\[\]]+")
SAMPLES = {"URL": "http://a:1", "PORT": "9000", "FILE": "/dev/null"}
WITH = {
    "--prefill": "--pd-disaggregation", "--decode": "--pd-disaggregation", "--selector": "--service-discovery",
    "--prefill-selector": "--service-discovery --pd-disaggregation --decode-selector a=b",
    "--decode-selector": "--service-discovery --pd-disaggregation --prefill-selector a=b",
    "--service-discovery": "--selector a=b", "--ssl-certfile": "--ssl-keyfile k", "--ssl-keyfile": "--ssl-certfile c",
    "--tls-cert-path": "--ssl-keyfile k", "--tls-key-path": "--ssl-certfile c",
    "--client-cert-path": "--client-key-path k", "--client-key-path": "--client-cert-path c"}
"""Further flags that a flag needs."""


def shown(config: type, capsys) -> list[str]:
    """The flags of --help, each with its values as it is written there."""
    with pytest.raises(SystemExit):
        parse(config, ["--help"], prog="x", description="")
    examples = [form for row in ROW.findall(capsys.readouterr().out) for form in row.split(", ") if "--" in form]
    return [form for form in examples
            if not form.startswith(("--help", "--config", "--version", "--print-completion"))]


def expanded(form: str, sample: str) -> Iterator[list[str]]:
    """The shortest command line of a form, the longest, and one for each of its alternatives."""
    name, *tokens = TOKEN.findall(form)
    for whole in (False, True):
        depth, words = 0, [name]
        for token in tokens:
            depth += {"[": 1, "]": -1}.get(token, 0)
            if token not in ("[", "]", "...") and (whole or not depth):
                words.append(token)
        alternatives = [word.strip("{}").replace("|", ",").split(",") if word[0] == "{" or "|" in word else [word]
                        for word in words]
        for at, choices in enumerate(alternatives):
            for choice in choices:
                line = [name] + [other[0] for other in alternatives[1:]]
                line[at] = choice
                yield [name, *(SAMPLES.get(word) or sample if word.isupper() and "=" not in word else word
                              for word in line[1:])]


def forms(config: type, capsys) -> list[list[str]]:
    defaults = {spelling: item.field.default for item in _flags(config)
                for spelling in ("--" + item.key.replace("_", "-"), *item.field.metadata["names"])}
    examples = []
    for form in shown(config, capsys):
        default = defaults.get(form.split()[0])
        sample = str(default) if default is not None and not isinstance(default, (bool, tuple)) else "1"
        examples += expanded(form, sample)
    return examples


def test_every_form_of_the_router_s_help_is_taken(capsys):
    examples = forms(RouterConfig, capsys)
    assert len(examples) > 90
    assert ["--prefill", "http://a:1", "none", "http://a:1", "9000"] in examples
    for line in examples:
        others = WITH.get(line[0], "").split()
        words = [f"http://a{at}:1" if word == "http://a:1" else word for at, word in enumerate(line)]
        parse(RouterConfig, [*words, *others], prog="x", description="")


def test_every_form_of_a_flag_with_many_values_is_taken_by_the_benchmark(capsys):
    for line in forms(BenchServing, capsys):
        if line[0] == "--header":
            parse(BenchServing, [*line, "--base-url", "http://a:1"], prog="x", description="")


@pytest.mark.parametrize(("flags", "workers"), [
    ("--decode http://a:1 http://b:1 --decode http://c:1", [("a", "ask"), ("b", "ask"), ("c", "ask")]),
    ("--prefill http://a:1 9000 http://b:1 http://c:1 none", [("a", 9000), ("b", "ask"), ("c", None)]),
    ("--prefill http://a:1 --prefill http://b:1 null", [("a", "ask"), ("b", None)])])
def test_workers_of_pairs_may_be_named_together_or_apart(flags, workers):
    config = parse(RouterConfig, ["--pd-disaggregation", *flags.split()], prog="x", description="")
    assert [(spec.url, spec.bootstrap_port) for spec in config.workers.specs] == [
        (f"http://{name}:1", port) for name, port in workers]


@pytest.mark.parametrize("flags", ["--prefill http://a:1 1 2", "--prefill 9000", "--prefill http://a:1 x",
                                   "--decode http://a:1 9000", "--decode http://a:1 http://a:1"])
def test_malformed_pairs_are_refused_in_one_sentence(flags, capsys):
    with pytest.raises(SystemExit):
        parse(RouterConfig, ["--pd-disaggregation", *flags.split()], prog="x", description="")
    assert len(capsys.readouterr().err.splitlines()) == 1

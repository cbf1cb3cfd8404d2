"""The README's flags are those of the commands: it names each, with the default that it has, and none that is not."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from baton.common.bench.draft_args import BenchDraft
from baton.common.bench.offline_args import BenchOffline
from baton.common.bench.one_batch_args import BenchOneBatch
from baton.common.bench.serving_args import BenchServing
from baton.common.config.cli import _flags
from baton.common.config.server import ServerConfig
from baton.kvtransfer.bench.args import BenchArgs
from baton.launch import ClusterConfig
from baton.router.config import RouterConfig

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
FLAG = re.compile(r"--[a-z][a-z0-9-]*[a-z0-9]")
NAMED = set(FLAG.findall(README))
TABLES = {"| flag | default | what it does |": ServerConfig, "| router flag | default | what it does |": RouterConfig}
CONFIGS = (RouterConfig, ServerConfig, ClusterConfig, BenchServing, BenchOneBatch, BenchOffline, BenchDraft, BenchArgs)
OTHERS = {"--kv-events-config", "--router", "--enable", "--no-deps"}  # SGLang's, what flags begin with, and pip's


def spellings(config: type) -> set[str]:
    found = {"--config", "--help", "--version", "--print-completion"}
    for item in _flags(config):
        name = item.key.replace("_", "-")
        found |= {f"--{name}", *item.field.metadata["names"], *({f"--no-{name}"} if item.field.default is True else ())}
    return found


def rows() -> list[tuple[type, list[str], list[str]]]:
    """``(command's configuration, flags, what is told as their defaults)`` of each row that tells defaults."""
    found, lines = [], iter(README.splitlines())
    for line in lines:
        if (config := TABLES.get(line)) is not None:
            next(lines)
            while (row := next(lines, "")).startswith("|"):
                cells = [cell.strip() for cell in row.split("|")]
                found.append((config, FLAG.findall(cells[1]), [told.strip() for told in cells[2].split(",")]))
    return found


def shown(default: Any) -> set[str]:
    """How a table may tell a default."""
    if default is dataclasses.MISSING or default is None or default is False or default == ():
        return {"", "off", "any"}
    if default is True:
        return {"", "told"}
    told = str(default).removesuffix(".0")
    return {told, str(default), f"{told}: off"}


@pytest.mark.parametrize("config", [RouterConfig, ServerConfig, ClusterConfig], ids=lambda config: config.__name__)
def test_every_flag_is_named(config):
    """A flag that is on by default may be named by what turns it off."""
    missing = [item.key for item in _flags(config)
               if not {f"--{item.key.replace('_', '-')}", f"--no-{item.key.replace('_', '-')}"} & NAMED]
    assert missing == []


def test_every_flag_that_is_named_exists():
    known = set().union(*map(spellings, CONFIGS)) | {f"--router-{flag[2:]}" for flag in spellings(RouterConfig)}
    for path in (ROOT / "tests/bench").glob("*.py"):  # these have parsers of their own
        known |= set(re.findall(r'"(--[a-z][a-z0-9-]+)"', path.read_text()))
    assert NAMED - known - OTHERS == set()


def test_defaults_are_told_as_they_are():
    told = rows()
    assert len(told) > 60
    wrong = []
    for config, flags, defaults in told:
        known = {item.key: item.field.default for item in _flags(config)}
        for flag, default in zip(flags, [*defaults, *[""] * (len(flags) - len(defaults))]):
            if flag.startswith("--no-") and flag[2:].replace("-", "_") not in known:
                flag = "--" + flag[5:]
            if default not in shown(known[flag[2:].replace("-", "_")]):
                wrong.append((flag, default, known[flag[2:].replace("-", "_")]))
    assert wrong == []

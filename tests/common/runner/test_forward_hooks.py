"""Hooks that see and replace what modules compute (--forward-hooks)."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.config.server import DebugArgs
from baton.common.runner.forward_hooks import add_hooks
from baton.tests.helpers.small_models import forward, load_runner, save_model, scattered_pages, server_config

TOKENS = np.arange(20)
SEEN: list[tuple[str, tuple[int, ...]]] = []


@pytest.fixture
def hooks(monkeypatch):
    """A module with two factories: one that notes outputs, one that scales them."""
    module = ModuleType("some_hooks")
    module.note = lambda config: lambda owner, args, output: SEEN.append((config["name"], tuple(output.shape)))
    module.scale = lambda config: lambda owner, args, output: output * config["by"]
    module.fails = lambda config: 1 / 0
    module.nothing = lambda config: None
    monkeypatch.setitem(sys.modules, "some_hooks", module)


def logits(folder, *specs):
    runner = load_runner(server_config(folder, **({"forward_hooks": json.dumps(specs)} if specs else {})))
    return forward(runner, [(TOKENS, 0, scattered_pages(runner, 1, 20)[0])])


def test_hooks_see_and_replace_outputs(tmp_path, hooks):
    save_model(tmp_path, "Llama")
    plain = logits(tmp_path)
    SEEN.clear()
    note = {"target_modules": ["model.layers.*.mlp", "lm_head"], "hook_factory": "some_hooks:note",
            "config": {"name": "x"}}
    assert torch.equal(logits(tmp_path, note), plain)
    assert SEEN == [("x", (20, 48))] * 3 + [("x", (20, 131))]
    scale = {"target_modules": ["lm_head"], "hook_factory": "some_hooks.scale", "config": {"by": 2}, "name": "twice"}
    assert torch.equal(logits(tmp_path, scale), 2 * plain)
    assert not torch.equal(logits(tmp_path, scale | {"target_modules": ["model.layers.1.mlp"]}), plain)


@pytest.mark.parametrize("spec, sentence", [
    ({"hook_factory": "some_hooks:missing"}, "some_hooks:missing makes no hook: AttributeError"),
    ({"hook_factory": "nowhere:make"}, "nowhere:make makes no hook: ModuleNotFoundError"),
    ({"hook_factory": "some_hooks:fails"}, "makes no hook: ZeroDivisionError"),
    ({"hook_factory": "some_hooks:nothing"}, "must return a function, not None"),
    ({"target_modules": ["encoder.*"]}, "no module of this model matches encoder")])
def test_what_cannot_be_hooked(tmp_path, hooks, spec, sentence):
    given = {"target_modules": ["lm_head"], "hook_factory": "some_hooks:note", "config": {"name": "x"}, **spec}
    with pytest.raises(ConfigError, match=sentence):
        add_hooks(DebugArgs(forward_hooks=json.dumps([given])).hooks, [])


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"target_modules": ["a"]}]', "x"])
def test_what_is_no_list_of_hooks(text):
    with pytest.raises(ConfigError, match="--forward-hooks must be a JSON list of objects"):
        DebugArgs(forward_hooks=text)

"""Who may import whom: the floors of tests/helpers/layers.py, held against the code and drawn into docs/layers.md."""

import subprocess
import sys

import pytest

from baton.tests.helpers import layers

KNOWN: set[str] = set()
"""Upward imports that are still to go: delete a line when its import is gone."""
TORCH_FREE = {"version", "process", "api", "config", "obs", "parsers", "serving"}
"""Parts of common/ that the router may use."""


@pytest.mark.parametrize("folder", layers.FLOORS)
def test_every_part_has_a_floor_and_imports_lower_ones_only(folder):
    assert not layers.parts_without_floor(folder)
    assert set(layers.upward(folder)) == {line for line in KNOWN if line.startswith(f"{folder}/") and folder}


def test_router_uses_only_the_torch_free_parts_of_common():
    wrong = [each for path in layers.source_files("router") for each in layers.imports_of(path)
             if each.target[0] not in ("router", "common")
             or each.target[0] == "common" and each.target[1] not in TORCH_FREE]
    assert not wrong


def test_the_page_in_docs_is_the_generated_one():
    assert (layers.ROOT / "docs/layers.md").read_text() == layers.page(), "python -m baton.tests.helpers.layers"


@pytest.mark.parametrize("module", [
    "baton.router.app", "baton.common.serving.server", "baton.common.serving.protocol.sampling",
    "baton.common.kvcache.manager",
    "baton.kvtransfer.bootstrap", "baton.prefill.launch", "baton.decode.launch", "baton.launch", "baton",
    "baton.offline", "baton.bench", "baton.common.bench.serving",
])
def test_import_does_not_bring_torch(module):
    """The router's install has no torch, and an API server that imports it starts seconds later."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0

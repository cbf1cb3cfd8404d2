"""Who may import whom: the table below and the floors of tests/helpers/layers.py, held against the code."""

import subprocess
import sys

import pytest

from baton.tests.helpers import layers

MAY_IMPORT = {
    "kernels": set(),
    "common": {"kernels"},
    "kvtransfer": {"common", "kernels"},
    "prefill": {"kvtransfer", "common"},
    "decode": {"kvtransfer", "common"},
    "router": {"common"},
    "simulate": {"kvtransfer", "common", "prefill", "decode", "router"},
    "lang": {"offline"},
}
TORCH_FREE = {"api", "commands", "config", "obs", "registry"}
"""Parts of common/ that the router may use, besides the schemas of common/serving/."""


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folder_imports_only_what_it_may(folder):
    wrong = [each for (source, target), found in layers.arrows("").items()
             if source == folder and target not in MAY_IMPORT[folder] for each in found]
    assert not wrong


@pytest.mark.parametrize("folder", layers.FLOORS)
def test_every_part_has_a_floor_and_imports_lower_ones_only(folder):
    assert not layers.parts_without_floor(folder)
    assert not layers.upward(folder)


def test_router_uses_only_the_torch_free_parts_of_common():
    wrong = [each for path in layers.source_files("router") for each in layers.imports_of(path)
             if each.target[0] == "common" and each.target[1] not in TORCH_FREE
             and (each.target[1], each.target[3:4]) != ("serving", ("schema",))]
    assert not wrong


@pytest.mark.parametrize("module", [
    "baton.router.app", "baton.common.serving.server", "baton.common.serving.protocol.sampling",
    "baton.common.kvcache.manager",
    "baton.kvtransfer.bootstrap", "baton.prefill.launch", "baton.decode.launch", "baton.launch", "baton",
    "baton.offline", "baton.bench", "baton.lang", "baton.common.bench.serving",
    "baton.simulate.command",
])
def test_import_does_not_bring_torch(module):
    """The router's install has no torch, and an API server that imports it starts seconds later."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0

"""Who may import whom: the table of the README's architecture section, held against the code."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("kernels", "common", "kvtransfer", "prefill", "decode", "router")
MAY_IMPORT = {
    "kernels": set(),
    "common": {"kernels"},
    "kvtransfer": {"common", "kernels"},
    "prefill": {"kvtransfer", "common"},
    "decode": {"kvtransfer", "common"},
    "router": {"common"},
}
TORCH_FREE_ROOMS = {"anthropic", "api", "config", "obs", "openai"}


def imports_of(path: Path):
    """Absolute dotted names below the package that a file imports, whatever block they stand in."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            module = tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                yield (*base, *module, alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "baton":
            for alias in node.names:
                yield (*node.module.split(".")[1:], alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "baton":
                    yield tuple(alias.name.split(".")[1:])


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_imports_only_what_it_may(folder):
    allowed = MAY_IMPORT[folder] | {folder}
    wrong = [
        f"{path.relative_to(ROOT)} imports {'.'.join(name)}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in imports_of(path)
        if name and name[0] in (*FOLDERS, "launch", "offline", "bench") and name[0] not in allowed
    ]
    assert not wrong


def test_router_uses_only_the_torch_free_rooms_of_common():
    wrong = [
        f"{path.relative_to(ROOT)} imports {'.'.join(name)}"
        for path in sorted((ROOT / "router").rglob("*.py"))
        for name in imports_of(path)
        if name[:1] == ("common",) and name[1] not in TORCH_FREE_ROOMS
    ]
    assert not wrong


@pytest.mark.parametrize("module", [
    "baton.router.app", "baton.common.serving.server", "baton.common.serving.protocol.requests",
    "baton.common.kvcache.manager",
    "baton.kvtransfer.bootstrap", "baton.prefill.launch", "baton.decode.launch", "baton.launch", "baton",
    "baton.offline", "baton.bench", "baton.common.bench.serving",
])
def test_import_does_not_bring_torch(module):
    """The router's install has no torch, and a front process that imports it starts seconds later."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0

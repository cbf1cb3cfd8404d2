"""The floors of the source tree and the imports between its folders, read from the code."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

FLOORS: dict[str, list[list[str]]] = {
    "": [["kernels"], ["common"], ["kvtransfer", "router"], ["prefill", "decode"], ["simulate"],
         ["launch", "launch_prefill", "launch_decode", "launch_router", "offline", "utils"],
         ["bench", "calibrate_double_sparsity", "launch_server", "launch_cluster", "lang"],
         ["bench_offline_throughput", "bench_one_batch", "bench_one_batch_server", "bench_serving"]],
    "kernels": [["device", "arguments", "gguf_blocks"], ["_triton"], ["_gluon", "tuning"], ["elementwise", "splitmix"],
                ["gated_activation"], ["reference"], ["rowwise", "speculative", "state"],
                ["comm", "sampling", "gemm"], ["float8", "gguf", "attention"],
                ["int8"], ["moe"]],
    "common": [["version", "process", "garbage_collector", "tinychat", "shared_memory"], ["api"], ["registry"],
               ["parsers"], ["config"], ["obs", "commands"],
               ["tokenizer"], ["weights", "distributed", "kvcache"], ["forward"], ["quantization"],
               ["layers", "attention"], ["models"], ["request"], ["grammar", "speculative"], ["sampling"],
               ["scheduler"], ["runner"],
               ["execution"], ["engine"], ["engine_client"], ["serving", "cluster"], ["bench", "calibration"]],
    "common/serving": [["protocol"], ["storage", "tool_servers"], ["context"], ["web"],
                       ["sse", "stats_logger", "forward"], ["respond", "host"],
                       ["chat", "completions", "native", "embeddings", "sessions", "files", "admin"],
                       ["messages", "responses", "tokens", "batches"], ["api_document", "offline"], ["app"],
                       ["tls_refresh"], ["http_server"], ["workers"], ["server"], ["unified_server"]],
    "kvtransfer": [["io_thread", "timing"], ["protocol"], ["backends"],
                   ["bootstrap", "checksum", "expiring", "requests"], ["notices", "failures"], ["driver", "endpoint"],
                   ["sender", "receiver", "pages"], ["bench"]],
    "lang": [["errors"], ["choices", "sampling", "http", "chat_template"], ["expressions"], ["api"], ["backends"],
             ["interpreter"], ["state"], ["program"]],
    "simulate": [["costs", "workload"], ["args"], ["results"], ["world"],
                 ["predict", "calibrate", "validation"], ["plan", "command"]],
    "router": [["config", "routes", "sglang_flags"], ["net"], ["workers"], ["policies", "admission"], ["obs"],
               ["relay"], ["monitoring"], ["admin"], ["components"], ["entry"], ["process_setup", "app"],
               ["multiprocess"], ["launch"]],
}
"""By folder, "" for the root: its parts from the ground up. A part imports parts of lower floors only."""


class Import(NamedTuple):
    """``source`` and ``target`` are module paths below the root, e.g. ("common", "config", "cli")."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    typing_only: bool


@functools.cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Every import of a module of ours, whatever block it is in. A file is parsed once a process."""
    source = path.relative_to(ROOT).with_suffix("").parts
    tree = ast.parse(path.read_text())
    typing_only = {id(node) for block in ast.walk(tree)
                   if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test) for node in block.body}
    return tuple(Import(source, target, id(node) in typing_only)
                 for node in ast.walk(tree) for target in _targets(node, source[:-1]))


def _targets(node: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(node, ast.ImportFrom):
        module = tuple(node.module.split(".")) if node.module else ()
        if node.level:
            module = package[: len(package) - node.level + 1] + module
        elif module[:1] != ("baton",):
            return
        else:
            module = module[1:]
        for alias in node.names:
            yield (*module, alias.name)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.startswith("baton."):
                yield tuple(alias.name.split(".")[1:])


def source_files(folder: str) -> list[Path]:
    """All Python files below ``folder``; for "" those of every folder and the root's own modules."""
    if folder:
        return sorted((ROOT / folder).rglob("*.py"))
    parts = [part for floor in FLOORS[""] for part in floor]
    return [path for part in parts
            for path in ([ROOT / f"{part}.py"] if (ROOT / f"{part}.py").exists() else source_files(part))]


def arrows(folder: str) -> dict[tuple[str, str], list[Import]]:
    """The imports from one part of ``folder`` to another, without those between the files of one part."""
    above = tuple(folder.split("/")) if folder else ()
    depth = len(above)
    parts = {part for floor in FLOORS[folder] for part in floor}
    found: dict[tuple[str, str], list[Import]] = defaultdict(list)
    for path in source_files(folder):
        for each in imports_of(path):
            inside = each.target[:depth] == above and len(each.target) > depth
            a, b = each.source[depth], each.target[depth] if inside else ""
            if inside and a != b and {a, b} <= parts:
                found[a, b].append(each)
    return found


def floor_of(folder: str) -> dict[str, int]:
    return {part: height for height, floor in enumerate(FLOORS[folder]) for part in floor}


def parts_without_floor(folder: str) -> set[str]:
    if not folder:
        return set()
    here = {path.relative_to(ROOT / folder).parts[0].removesuffix(".py") for path in source_files(folder)}
    return here - floor_of(folder).keys() - {"__init__"}


def upward(folder: str) -> list[str]:
    """The imports of a part from its own floor or a higher one, typing-only imports left out."""
    floor = floor_of(folder)
    return [f"{'/'.join(each.source)} imports {'.'.join(each.target)}"
            for (a, b), found in sorted(arrows(folder).items()) if floor[b] >= floor[a]
            for each in found if not each.typing_only]


def page() -> str:
    """The text of ``docs/layers.md``: per folder its floors from the top down, and what each part imports."""
    lines = ["# Layers", "",
             "Generated by `make docs` from the imports in the code.",
             "A part imports parts of lower rows only: `tests/test_layers.py` fails otherwise.", ""]
    for folder in FLOORS:
        found = arrows(folder)
        lines += [f"## {folder + '/' if folder else 'The folders'}", "", "| floor | part | imports |", "|---|---|---|"]
        for height, floor in reversed(list(enumerate(FLOORS[folder]))):
            for part in floor:
                below = ", ".join(f"`{b}`" for (a, b), each in sorted(found.items())
                                  if a == part and not all(one.typing_only for one in each))
                lines.append(f"| {height} | `{part}` | {below or '-'} |")
        lines.append("")
    return "\n".join(lines)

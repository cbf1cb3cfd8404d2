"""What Triton makes of the kernels for an H100 or H200, on any machine: registers, spills, shared memory, or the error.

    python -m baton.tests.kernels.compile_for_hopper [WORD ...] [--exactly] [--json] [--ptx FOLDER]

compiles the cases whose name has one of the words, or with ``--exactly`` is one of them (all without any), in a fresh
cache. The interpreter takes much that the compiler refuses, so that a kernel which only ran there may not run at all.
``--ptx`` keeps each kernel's PTX, without its line numbers: ``diff -r`` of two folders says what a change, or another
Triton, made different.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from baton.kernels.tuning.moe import MoENumbers, MoEPolicy

from . import hopper_cases
from .h200 import policy_of_h200


class Compiler:
    """Takes the place of every kernel's launch: it is compiled as the launch asks, and does not run."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Any]] = []
        self._run = JITFunction.run
        JITFunction.run = lambda kernel, *args, grid, warmup, **kw: self._compile(kernel, args, kw)
        triton.runtime.driver.set_active(SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
            get_current_stream=lambda device: 0))
        h200 = policy_of_h200(runs_gluon=False)  # cases name the tiles of kernels written in Gluon
        # Measured tiles of experts change with the number of tokens, and a server compiles all of them at start.
        policy = replace(h200, moe=MoEPolicy(h200.facts, MoENumbers()))
        for name, module in list(sys.modules.items()):
            if name.startswith("baton.kernels.") and hasattr(module, "runs_triton"):
                module.runs_triton = lambda tensor: True
            if name.startswith("baton.kernels.") and hasattr(module, "pdl"):
                module.pdl = lambda tensor: {"PDL": True, "launch_pdl": True}
            if name.startswith("baton.kernels.") and hasattr(module, "policy_of"):
                module.policy_of = lambda device: policy

    def _compile(self, kernel: JITFunction, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        known = {id(made) for _, made in self.found}
        made = self._run(kernel, *args, grid=(1,), warmup=True, **options)
        if id(made) not in known:
            self.found.append((kernel.__name__, made))

    def made_by(self, launch: Callable[[], object]) -> list[tuple[str, Any]]:
        """Kernels that ``launch`` is the first to need."""
        before = len(self.found)
        launch()
        return self.found[before:]


def resources(made: Any) -> dict[str, int]:
    """Registers of a thread; bytes of local memory that it spills to; bytes of a program's shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        told = subprocess.run([knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name], check=True,
                              capture_output=True, text=True).stdout
    of = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return {"registers": of["REG"], "spilled": of["STACK"] + of["LOCAL"], "shared": made.metadata.shared}


def bare_ptx(made: Any) -> str:
    """The instructions alone: where in the source they came from, and its path, differ between equal kernels."""
    code = made.asm["ptx"].split(".section", 1)[0]
    lines = (line.split("//", 1)[0].rstrip() for line in code.splitlines())
    return "\n".join(line for line in lines if line and not re.match(r"\s*\.(loc|file)\b|\$L__(tmp|func)", line)) + "\n"


def compile_all(names: list[str], ptx: Path | None = None) -> Iterator[dict[str, Any]]:
    """A row for each kernel that a case is the first to need: what it takes, or the error that kept it from being
    compiled. ``size`` is there where the case had been compiled, and a batch of that size needed another kernel.
    PTX goes to the folder ``ptx``."""
    compiler = Compiler()
    for name in names:
        try:
            for number, (kernel, made) in enumerate(compiler.made_by(hopper_cases.CASES[name])):
                if ptx is not None:
                    (ptx / f"{re.sub('[^A-Za-z0-9]+', '-', name)}{kernel}-{number}.ptx").write_text(bare_ptx(made))
                yield {"case": name, "kernel": kernel, **resources(made), "warps": made.metadata.num_warps}
            for size in hopper_cases.SIZES if name in hopper_cases.OTHER_SIZES else ():
                for kernel, made in compiler.made_by(partial(hopper_cases.OTHER_SIZES[name], size)):
                    yield {"case": name, "kernel": kernel, **resources(made), "warps": made.metadata.num_warps,
                           "size": size}
        except Exception as error:  # whatever a kernel's compilation raises is what is asked for
            yield {"case": name, "error": f"{type(error).__name__}: {error}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--exactly", action="store_true", help="words are whole names")
    parser.add_argument("--json", action="store_true", help="an object a line in place of the table")
    parser.add_argument("--ptx", type=Path, help="a folder for each kernel's PTX")
    args = parser.parse_args()
    if args.ptx is not None:
        args.ptx.mkdir(parents=True, exist_ok=True)
    names = args.words if args.exactly else [name for name in hopper_cases.CASES
                                             if not args.words or any(word in name for word in args.words)]
    with tempfile.TemporaryDirectory() as cache:
        knobs.cache.dir = cache
        for row in compile_all(names, args.ptx):
            if args.json:
                print(json.dumps(row), flush=True)
            elif "error" in row:
                print(f"{row['case']}: {row['error']}", flush=True)
            else:
                print(f"{row['kernel']:28} {row['registers']:4} registers {row['spilled']:5} B spilled "
                      f"{row['shared']:7} B shared {row['warps']:2} warps  {row['case']}"
                      + (f": ANEW for a batch of {row['size']}" if "size" in row else ""), flush=True)


if __name__ == "__main__":
    main()

"""Which versions of CUDA's stack are tested together, and what an operator is told of others."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from ...kernels._triton import AVAILABLE, GLUON_VERSIONS, compiles_gluon, on_hopper, triton

log = logging.getLogger("baton.engine")


@dataclass(frozen=True)
class Stack:
    """What decides which code a GPU runs, by its first two numbers; None where it was not there."""

    torch: str
    cuda: str
    triton: str
    flashinfer: str | None = None
    nixl: str | None = None

    def __str__(self) -> str:
        named = {"torch": f"{self.torch} with CUDA {self.cuda}", "Triton": self.triton, "FlashInfer": self.flashinfer,
                 "NIXL": self.nixl}
        return ", ".join(f"{name} {found}" for name, found in named.items() if found)


MEASURED = Stack("2.11", "13.0", "3.6", "0.6", "1.5")
"""Every test and every figure on GPUs is of this one; requirements/cuda.txt installs it."""
COMPILED = (Stack("2.10", "12.8", "3.6"), Stack("2.12", "13.0", "3.7"), Stack("2.13", "13.0", "3.7"),
            Stack("2.14", "13.0", "3.8"), Stack("2.15", "13.2", "3.9"))
"""With these every kernel compiles for a Hopper GPU; no engine has run on one."""

_CONSTRAINTS = "-c requirements/cuda.txt '.[engine,cuda]'"


def warn_of_stack(device: torch.device) -> None:
    """Logs one warning where a GPU's stack is not the one that was measured."""
    if device.type != "cuda" or torch.version.cuda is None:
        return
    installed = {"torch": torch.__version__, "cuda": torch.version.cuda,
                 "triton": triton.__version__ if AVAILABLE else None,
                 "flashinfer": _installed("flashinfer-python"), "nixl": _installed("nixl")}
    if notes := notes_of(installed, on_hopper(device)):
        log.warning("%s", " ".join(notes))


def notes_of(installed: Mapping[str, str | None], hopper: bool) -> list[str]:
    """Sentences on versions by the names of ``Stack``'s fields (None where there is none), on a GPU of that kind."""
    found = {name: _minor(number) for name, number in installed.items() if number is not None}
    notes = []
    if "triton" not in found:
        notes.append("Triton is not installed: our kernels' work runs as operations of torch, several times slower "
                     f"(pip install {_CONSTRAINTS}).")
    elif hopper and not compiles_gluon(found["triton"]):
        notes.append(f"Triton {installed['triton']} does not run our kernels in Gluon ({GLUON_VERSIONS[0]} to "
                     f"{GLUON_VERSIONS[-1]} do): decode steps take 2 to 8 % longer, long prompts 6 %, mixtures' "
                     "products 11 %.")
    if unlike := [f"{name} {installed[name]}" for name in found if found[name] != getattr(MEASURED, name)]:
        notes.append(f"This stack was {_how_tested(found)} ({', '.join(unlike)}). What was measured, and "
                     f"\"pip install {_CONSTRAINTS}\" in Baton's source folder installs, is {MEASURED}.")
    return notes


def _how_tested(found: Mapping[str, str]) -> str:
    core = [(stack.torch, stack.cuda, stack.triton) for stack in (MEASURED, *COMPILED)]
    kind = (found["torch"], found["cuda"], found.get("triton"))
    if kind == core[0]:
        return "measured with other libraries"
    return "only compiled for, not run on a GPU" if kind in core else "not tested"


def _minor(number: str) -> str:
    return ".".join(number.split("+")[0].split(".")[:2])


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

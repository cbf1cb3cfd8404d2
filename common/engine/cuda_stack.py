"""Versions of CUDA's software stack that are tested together, and the warning about others."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from ...kernels._triton import AVAILABLE, GLUON_VERSIONS, compiles_gluon, triton
from ...kernels.device import is_hopper

log = logging.getLogger("baton.engine")


@dataclass(frozen=True)
class Stack:
    """Versions (major.minor) of the packages that decide which code a GPU runs; None for one that is absent."""

    torch: str
    cuda: str
    triton: str
    flashinfer: str | None = None
    nixl: str | None = None

    def __str__(self) -> str:
        named = {"torch": f"{self.torch} with CUDA {self.cuda}", "Triton": self.triton, "FlashInfer": self.flashinfer,
                 "NIXL": self.nixl}
        return ", ".join(f"{name} {number}" for name, number in named.items() if number)


MEASURED = Stack("2.11", "13.0", "3.6", "0.6", "1.5")
"""All GPU tests and measurements ran with these versions; requirements/cuda.txt installs them."""
COMPILED = (Stack("2.10", "12.8", "3.6"), Stack("2.12", "13.0", "3.7"), Stack("2.13", "13.0", "3.7"),
            Stack("2.14", "13.0", "3.8"), Stack("2.15", "13.2", "3.9"))
"""Every kernel compiles for a Hopper GPU with these versions; no engine has run with them."""

_CONSTRAINTS = "-c requirements/cuda.txt '.[engine,cuda]'"


def warn_of_stack(device: torch.device) -> None:
    """Log one warning where a GPU's stack differs from ``MEASURED``."""
    if device.type != "cuda" or torch.version.cuda is None:
        return
    installed = {"torch": torch.__version__, "cuda": torch.version.cuda,
                 "triton": triton.__version__ if AVAILABLE else None,
                 "flashinfer": _installed("flashinfer-python"), "nixl": _installed("nixl")}
    if notes := notes_of(installed, is_hopper(device)):
        log.warning("%s", " ".join(notes))


def notes_of(installed: Mapping[str, str | None], hopper: bool) -> list[str]:
    """Sentences about installed versions, given by the names of ``Stack``'s fields (None for an absent package).
    ``hopper``: the GPU is a Hopper."""
    versions = {name: _minor(number) for name, number in installed.items() if number is not None}
    notes = []
    if "triton" not in versions:
        notes.append("Triton is not installed: our kernels' work runs as operations of torch, several times slower "
                     f"(pip install {_CONSTRAINTS}).")
    elif hopper and not compiles_gluon(versions["triton"]):
        notes.append(f"Triton {installed['triton']} does not run our kernels in Gluon ({GLUON_VERSIONS[0]} to "
                     f"{GLUON_VERSIONS[-1]} do): decode steps take 2 to 8 % longer, long prompts 6 %, mixtures' "
                     "products 11 %.")
    if differing := [f"{name} {installed[name]}" for name in versions if versions[name] != getattr(MEASURED, name)]:
        notes.append(f"This stack was {_how_tested(versions)} ({', '.join(differing)}). What was measured, and "
                     f"\"pip install {_CONSTRAINTS}\" in Baton's source folder installs, is {MEASURED}.")
    return notes


def _how_tested(versions: Mapping[str, str]) -> str:
    core = [(stack.torch, stack.cuda, stack.triton) for stack in (MEASURED, *COMPILED)]
    installed = (versions["torch"], versions["cuda"], versions.get("triton"))
    if installed == core[0]:
        return "measured with other libraries"
    return "only compiled for, not run on a GPU" if installed in core else "not tested"


def _minor(number: str) -> str:
    return ".".join(number.split("+")[0].split(".")[:2])


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

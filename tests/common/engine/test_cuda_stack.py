"""The warning about a stack that was not measured; install, image and docs name the measured one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from baton.common.engine import cuda_stack
from baton.common.engine.cuda_stack import COMPILED, MEASURED, notes_of
from baton.kernels._triton import GLUON_VERSIONS, compiles_gluon

ROOT = Path(__file__).resolve().parents[3]
PINS = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "requirements/cuda.txt").read_text(), re.MULTILINE))
HERE = {"torch": "2.11.0+cu130", "cuda": "13.0", "triton": "3.6.0", "flashinfer": "0.6.11", "nixl": "1.5.1"}


def test_the_measured_stack_gives_no_warning():
    assert notes_of(HERE, hopper=True) == notes_of({**HERE, "flashinfer": None, "nixl": None}, hopper=True) == []


@pytest.mark.parametrize("others,hopper,said", [
    ({"torch": "2.15.0", "cuda": "13.2", "triton": "3.9.0"}, True, ["only compiled for"]),
    ({"torch": "2.16.0", "cuda": "13.2", "triton": "3.10.1"}, True, ["Triton 3.10.1 does not run", "not tested"]),
    ({"torch": "2.9.1+cu128", "cuda": "12.8", "triton": "3.5.1"}, True, ["Triton 3.5.1 does not run", "not tested"]),
    ({"torch": "2.9.1+cu128", "cuda": "12.8", "triton": "3.5.1"}, False, ["not tested"]),
    ({"triton": None}, True, ["Triton is not installed"]),
    ({"flashinfer": "0.7.2.post1"}, True, ["measured with other libraries (flashinfer 0.7.2.post1)"]),
], ids=range(6))
def test_a_differing_stack_gives_a_warning(others, hopper, said):
    notes = notes_of({**HERE, **others}, hopper)
    assert len(notes) == len(said) and all(part in note for part, note in zip(said, notes)), notes
    assert "requirements/cuda.txt" in notes[-1]


def test_one_warning_at_most(monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "cuda", "13.9")
    monkeypatch.setattr(cuda_stack, "is_hopper", lambda device: True)
    cuda_stack.warn_of_stack(torch.device("cpu"))
    assert not caplog.records
    cuda_stack.warn_of_stack(torch.device("cuda"))
    assert len(caplog.records) == 1 and "cuda 13.9" in caplog.text


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def test_install_and_image_are_of_the_measured_stack():
    pinned = {"torch": PINS["torch"], "triton": PINS["triton"], "flashinfer": PINS["flashinfer-python"],
              "nixl": PINS["nixl"]}
    assert {name: minor(pin) for name, pin in pinned.items()} == {name: getattr(MEASURED, name) for name in pinned}
    image = (ROOT / "deploy/Dockerfile.engine").read_text()
    assert f"pytorch/pytorch:{PINS['torch']}-cuda{MEASURED.cuda}-cudnn9-runtime" in image
    assert f"ARG CUDA=cu{MEASURED.cuda.replace('.', '')}\n" in image
    for name in ("README.md", "docs/deployment.md", "Makefile", "deploy/Dockerfile.engine"):
        assert "requirements/cuda.txt" in (ROOT / name).read_text(), name


def test_docs_list_the_tested_stacks():
    rows = re.findall(r"^\| (\d\.\d+) \| (\d+\.\d) \| (\d\.\d) \| (measured|every kernel compiles)",
                      (ROOT / "docs/deployment.md").read_text(), re.MULTILINE)
    listed = {kind: sorted(row[:3] for row in rows if row[3] == kind) for kind in ("measured", "every kernel compiles")}
    of = [(stack.torch, stack.cuda, stack.triton) for stack in COMPILED]
    assert listed == {"measured": [(MEASURED.torch, MEASURED.cuda, MEASURED.triton)],
                      "every kernel compiles": sorted(of)}


def test_requirements_end_with_what_was_tested():
    project = (ROOT / "pyproject.toml").read_text()
    newest = max((MEASURED, *COMPILED), key=lambda stack: tuple(map(int, stack.torch.split("."))))
    for name, tested in (("torch", newest.torch), ("triton", newest.triton)):
        major, last = tested.split(".")
        bounds = re.findall(rf'"{name}>=[\d.]+,<([\d.]+)"', project)
        assert bounds and set(bounds) == {f"{major}.{int(last) + 1}"}, name
    assert all(compiles_gluon(stack.triton) for stack in (MEASURED, *COMPILED))
    assert newest.triton == GLUON_VERSIONS[-1]

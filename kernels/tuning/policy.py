"""Chooses kernels: every launcher asks the policy of its device which kernel runs, by which tile, for how many rows.

A device has measured numbers and tiles in ``<its name>.json`` in this folder. What its file leaves out, and all of a
device without a file, follows from rules: by the SMs of the GPU and the shared memory of a program. No choice depends
on whether a CUDA graph is being captured, so that eager runs compute what graphs do.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from .. import _triton, device
from ..device import DeviceFacts, device_slug
from .all_to_all import AllToAllPolicy
from .attention import AttentionNumbers, AttentionPolicy
from .float8 import Float8Numbers, Float8Policy
from .gemm import GemmNumbers, GemmPolicy
from .moe import MoENumbers, MoEPolicy, tiles_from_json, tiles_to_json
from .packed_ints import PackedIntNumbers, PackedIntPolicy

FOLDER = Path(__file__).parent

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Policy:
    """The choosers of a device. ``batch_invariant``: no choice depends on the number of rows, tokens or requests, so
    that a row's sums are added in the same order whatever the batch. Each chooser obeys; the choices then are not the
    fastest. All-reduces are then NCCL's, whose order is the same where NCCL_ALGO and NCCL_PROTO are set."""

    facts: DeviceFacts
    gemm: GemmPolicy
    float8: Float8Policy
    attention: AttentionPolicy
    moe: MoEPolicy
    all_to_all: AllToAllPolicy
    packed_ints: PackedIntPolicy
    batch_invariant: bool = False

    @classmethod
    def load(cls, facts: DeviceFacts, folder: Path = FOLDER, batch_invariant: bool = False) -> Policy:
        """The policy of a device: its file over the rules. Raises TypeError or AttributeError where the file names what
        no rule has."""
        measured = read_file(facts.name, folder)
        moe = MoENumbers.derived(facts)
        of_experts = dict(measured.get("moe", {}))
        tiles = tiles_from_json(of_experts.pop("tiles", {}))
        attention = _over(AttentionNumbers.derived(facts), measured.get("attention", {}))
        return cls(
            facts,
            GemmPolicy(facts, _over(GemmNumbers.derived(facts), measured.get("gemm", {})), batch_invariant),
            Float8Policy(facts, _over(Float8Numbers.derived(facts), measured.get("float8", {})), batch_invariant),
            AttentionPolicy(facts, attention, batch_invariant),
            MoEPolicy(facts, replace(_over(moe, of_experts), tiles=tiles), batch_invariant),
            _over(AllToAllPolicy.derived(facts), measured.get("all_to_all", {})),
            PackedIntPolicy(facts, _over(PackedIntNumbers.derived(facts), measured.get("packed_ints", {})),
                            batch_invariant), batch_invariant)


class _Switch:
    """This process's choice between the fastest and the batch-invariant policies."""

    batch_invariant = False


def set_batch_invariant(on: bool) -> None:
    """Makes the policies of all devices obey ``batch_invariant`` from now on. Models and attention backends keep the
    policy that they were made with: call this before they are made."""
    _Switch.batch_invariant = on
    policy_of.cache_clear()


def is_batch_invariant() -> bool:
    """True where ``set_batch_invariant`` has asked for it."""
    return _Switch.batch_invariant


@functools.cache
def policy_of(of: torch.device) -> Policy:
    return Policy.load(DeviceFacts(
        device.device_name(of), device.num_sms(of), device.shared_bytes(of),
        runs_triton=_triton.INTERPRETED or (_triton.AVAILABLE and of.type == "cuda"),
        runs_gluon=_triton.runs_gluon(of), is_hopper=device.is_hopper(of)),
        batch_invariant=_Switch.batch_invariant)


def read_file(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """The content of a device's file; empty where there is none."""
    file = file_of(name, folder)
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return content


def write_moe_tiles(name: str, measured: Mapping[str, Any], folder: Path = FOLDER) -> None:
    """Replace the tiles of experts in a device's file."""
    content = read_file(name, folder)
    content.setdefault("moe", {})["tiles"] = tiles_to_json(measured)
    folder.mkdir(exist_ok=True, parents=True)
    file_of(name, folder).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def file_of(name: str, folder: Path = FOLDER) -> Path:
    return folder / f"{device_slug(name)}.json"


def _over(rule: T, measured: Any) -> T:
    """``rule`` with the values of ``measured`` in place of its own, field by field."""
    if is_dataclass(rule) and not isinstance(rule, type):
        return replace(rule, **{name: _over(getattr(rule, name), value) for name, value in measured.items()})
    if isinstance(rule, tuple) and hasattr(rule, "_replace"):
        return rule._replace(**measured)  # type: ignore[no-any-return]
    if isinstance(rule, tuple):
        return tuple(tuple(each) for each in measured)  # type: ignore[return-value]
    return measured  # type: ignore[no-any-return]

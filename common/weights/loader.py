"""Fills a model's slots: from safetensors, tensor by tensor, or with seeded random values."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...kernels.reference import FP8_LARGEST
from ..api.errors import ConfigError
from ..config.moe import Stacked
from .files import checkpoint_files, some, tensors_of
from .kv_scales import is_kv_scale
from .slots import Slot

Progress = Callable[[str, float], None]


def silent(stage: str, fraction: float) -> None:
    """A Progress that nobody waits for."""


Elsewhere = Callable[[str], bool]


def nowhere(name: str) -> bool:
    """This rank's stage is the only one: no tensor belongs to another."""
    return False


log = logging.getLogger("baton.weights")

_DUMMY_STD = 0.02
_DUMMY_SCALES = {"weight scale": 2.0**-12, "input scale": 2.0**-5}
"""Deviations of 0.02 take a fifth of float8's range by the first; activations of up to 14 stay within the second."""


def load_safetensors(folder: Path, slots: Iterable[Slot], progress: Progress, *, tied: bool,
                     unused: tuple[str, ...] = (), elsewhere: Elsewhere = nowhere,
                     stacked: Stacked = "rows") -> None:
    """Copy every slot's slice from the checkpoint; at most one slice is in host memory beside the parameters.

    ``progress("loading weights", fraction)`` is told after each tensor. ``tied`` lets a redundant ``lm_head.weight``
    pass, and ``unused`` the names that begin with one of these: layers of multi-token prediction, of which a log line
    tells.
    ``elsewhere`` says which names other stages of a pipeline load. ``stacked`` is MoESpec's.
    Raises ConfigError for a tensor that is missing or of another shape, and for an unreadable file; of further tensors
    a warning tells the names.
    """
    wanted = {slot.name: slot for slot in slots}
    total = sum(slot.target.numel() for slot in wanted.values())
    done = num_unused = 0
    unexpected: list[str] = []
    missing = set(wanted)
    for file in checkpoint_files(folder):
        for name, source in tensors_of(file, stacked):
            slot = _slot_of(name, wanted)
            if slot is None:
                num_unused += name.startswith(unused)
                if not _redundant(name, tied) and not name.startswith(unused) and not elsewhere(name):
                    unexpected.append(name)
                continue
            _fill(slot, source, file)
            missing.discard(slot.name)
            done += slot.target.numel()
            progress("loading weights", min(done / total, 1.0))
    if num_unused:
        log.info("%d tensors of %s are not loaded: multi-token prediction is not used", num_unused, ", ".join(unused))
    if missing:
        raise ConfigError(f"The checkpoint {folder} lacks {some(missing)}.")
    if unexpected:
        log.warning("the checkpoint %s holds %s, which its architecture does not have: they are not loaded", folder,
                    some(unexpected))


def check_safetensors(folder: Path, slots: Iterable[Slot], *, stacked: Stacked = "rows") -> None:
    """Raises the ConfigError that ``load_safetensors`` would end with; reads no tensor."""
    wanted = {slot.name: slot for slot in slots}
    missing = set(wanted)
    for file in checkpoint_files(folder):
        for name, source in tensors_of(file, stacked):
            slot = _slot_of(name, wanted)
            if slot is not None:
                _check(slot, source, file)
                missing.discard(slot.name)
    if missing:
        raise ConfigError(f"The checkpoint {folder} lacks {some(missing)}.")


def load_dummy(slots: Iterable[Slot], seed: int, progress: Progress) -> None:
    """Norms of one, scales constant, all else normal with deviation 0.02, by ``seed`` and tensor name.

    Each tensor is drawn whole on the device and then sliced, so that any number of ranks holds the same model.
    """
    slots = list(slots)
    for done, slot in enumerate(slots, 1):
        if not slot.target.numel():
            continue
        if "norm" in slot.name:
            slot.target.fill_(1.0)
        elif slot.holds in _DUMMY_SCALES:
            slot.fill(torch.full(slot.shape, _DUMMY_SCALES[slot.holds], device=slot.target.device))
        else:
            slot.fill(_drawn(slot, seed))
        progress("loading weights", done / len(slots))


def _drawn(slot: Slot, seed: int) -> torch.Tensor:
    """The whole tensor, drawn in float32 where it becomes float8."""
    target = slot.target
    generator = torch.Generator(target.device)
    # Hashed to 32 bits: of a wider seed, torch's CPU generator ignores the rest.
    generator.manual_seed(zlib.crc32(f"{seed}/{slot.name}".encode()))
    dtype = torch.float32 if target.itemsize == 1 else target.dtype
    std = _DUMMY_STD / _DUMMY_SCALES["weight scale"] if slot.holds == "float8" else _DUMMY_STD
    drawn = torch.empty(slot.shape, dtype=dtype, device=target.device).normal_(0.0, std, generator=generator)
    # Of billions of values some lie beyond float8's largest, and would become NaN.
    return drawn.clamp_(-FP8_LARGEST, FP8_LARGEST) if slot.holds == "float8" else drawn


def _fill(slot: Slot, source: Any, file: Path) -> None:
    _check(slot, source, file)
    slot.fill(source)


def _check(slot: Slot, source: Any, file: Path) -> None:
    shape, dtype = tuple(source.get_shape()), source.get_dtype()
    if slot.holds in _DUMMY_SCALES:  # written with and without dimensions of one
        same = [n for n in shape if n != 1] == [n for n in slot.shape if n != 1]
    else:
        same = shape == slot.shape
    if not same:
        raise ConfigError(f"{slot.name} in {file.name} has shape {list(shape)}, but config.json asks for "
                          f"{list(slot.shape)}.")
    if slot.holds == "values" and dtype.startswith("F8"):
        raise ConfigError(f"{slot.name} in {file.name} is float8, but by config.json it is not quantized.")
    if slot.holds == "float8" and dtype != "F8_E4M3":
        raise ConfigError(f"{slot.name} in {file.name} is {dtype}, but by config.json it is float8 (e4m3).")


def _slot_of(name: str, wanted: Mapping[str, Slot]) -> Slot | None:
    """Checkpoints of a model without a head leave out the name of the part that all others have."""
    return wanted.get(name) or wanted.get(f"model.{name}")


def _redundant(name: str, tied: bool) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight") or is_kv_scale(name)

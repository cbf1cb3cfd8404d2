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
from .files import checkpoint_files, first_names, tensors_of
from .kv_scales import is_kv_scale
from .slots import Slot

Progress = Callable[[str, float], None]


def silent(stage: str, fraction: float) -> None:
    """A Progress that reports nothing."""


OnOtherStage = Callable[[str], bool]
"""Returns whether another pipeline stage loads the tensor of this name."""


def on_no_other_stage(name: str) -> bool:
    """Returns False: there is one stage only."""
    return False


log = logging.getLogger("baton.weights")

_DUMMY_STD = 0.02
_DUMMY_SCALES = {"weight scale": 2.0**-12, "input scale": 2.0**-5}
"""With this weight scale a deviation of 0.02 takes a fifth of float8's range; activations of up to 14 fit the input
scale."""


def load_safetensors(folder: Path, slots: Iterable[Slot], progress: Progress, *, tied: bool,
                     unused: tuple[str, ...] = (), on_other_stage: OnOtherStage = on_no_other_stage,
                     stacked: Stacked = "rows") -> None:
    """Copies every slot's slice from the checkpoint; at most one slice is in host memory besides the parameters.

    Calls ``progress("loading weights", fraction)`` after each tensor. ``tied`` permits a redundant ``lm_head.weight``,
    and ``unused`` names with these prefixes: layers of multi-token prediction, which are logged. ``on_other_stage``
    returns whether another pipeline stage loads a name. ``stacked`` is MoESpec's.

    Raises ConfigError for a tensor that is missing or of another shape, and for an unreadable file; logs a warning with
    the names of unexpected tensors.
    """
    slots_by_name = {slot.name: slot for slot in slots}
    total = sum(slot.target.numel() for slot in slots_by_name.values())
    done = num_unused = 0
    unexpected: list[str] = []
    missing = set(slots_by_name)
    for file in checkpoint_files(folder):
        for name, source in tensors_of(file, stacked):
            slot = _slot_of(name, slots_by_name)
            if slot is None:
                num_unused += name.startswith(unused)
                if not _is_redundant(name, tied) and not name.startswith(unused) and not on_other_stage(name):
                    unexpected.append(name)
                continue
            _fill(slot, source, file)
            missing.discard(slot.name)
            done += slot.target.numel()
            progress("loading weights", min(done / total, 1.0))
    if num_unused:
        log.info("%d tensors of %s are not loaded: multi-token prediction is not used", num_unused, ", ".join(unused))
    if missing:
        raise ConfigError(f"The checkpoint {folder} lacks {first_names(missing)}.")
    if unexpected:
        log.warning("the checkpoint %s holds %s, which its architecture does not have: they are not loaded", folder,
                    first_names(unexpected))


def check_safetensors(folder: Path, slots: Iterable[Slot], *, stacked: Stacked = "rows") -> None:
    """Raises the ConfigError that ``load_safetensors`` would raise; reads no tensor."""
    slots_by_name = {slot.name: slot for slot in slots}
    missing = set(slots_by_name)
    for file in checkpoint_files(folder):
        for name, source in tensors_of(file, stacked):
            slot = _slot_of(name, slots_by_name)
            if slot is not None:
                _check(slot, source, file)
                missing.discard(slot.name)
    if missing:
        raise ConfigError(f"The checkpoint {folder} lacks {first_names(missing)}.")


def load_dummy(slots: Iterable[Slot], seed: int, progress: Progress) -> None:
    """Fills slots with dummy weights: norms of one, constant scales, all else normal with deviation 0.02, by ``seed``
    and tensor name.

    Each tensor is generated whole on the device and then sliced, so that any number of ranks has the same model.
    """
    slots = list(slots)
    for done, slot in enumerate(slots, 1):
        if not slot.target.numel():
            continue
        if "norm" in slot.name:
            slot.target.fill_(1.0)
        elif slot.kind in _DUMMY_SCALES:
            slot.fill(torch.full(slot.shape, _DUMMY_SCALES[slot.kind], device=slot.target.device))
        else:
            slot.fill(_random_tensor(slot, seed))
        progress("loading weights", done / len(slots))


def _random_tensor(slot: Slot, seed: int) -> torch.Tensor:
    """Generates the whole tensor, in float32 where it becomes float8."""
    target = slot.target
    generator = torch.Generator(target.device)
    # Hashed to 32 bits: of a wider seed, torch's CPU generator ignores the rest.
    generator.manual_seed(zlib.crc32(f"{seed}/{slot.name}".encode()))
    dtype = torch.float32 if target.itemsize == 1 else target.dtype
    std = _DUMMY_STD / _DUMMY_SCALES["weight scale"] if slot.kind == "float8" else _DUMMY_STD
    values = torch.empty(slot.shape, dtype=dtype, device=target.device).normal_(0.0, std, generator=generator)
    # Of billions of values some lie beyond float8's largest, and would become NaN.
    return values.clamp_(-FP8_LARGEST, FP8_LARGEST) if slot.kind == "float8" else values


def _fill(slot: Slot, source: Any, file: Path) -> None:
    _check(slot, source, file)
    slot.fill(source)


def _check(slot: Slot, source: Any, file: Path) -> None:
    shape, dtype = tuple(source.get_shape()), source.get_dtype()
    if slot.kind in _DUMMY_SCALES:  # written with and without dimensions of one
        same = [n for n in shape if n != 1] == [n for n in slot.shape if n != 1]
    else:
        same = shape == slot.shape
    if not same:
        raise ConfigError(f"{slot.name} in {file.name} has shape {list(shape)}, but config.json asks for "
                          f"{list(slot.shape)}.")
    if slot.kind == "values" and dtype.startswith("F8"):
        raise ConfigError(f"{slot.name} in {file.name} is float8, but by config.json it is not quantized.")
    if slot.kind == "float8" and dtype != "F8_E4M3":
        raise ConfigError(f"{slot.name} in {file.name} is {dtype}, but by config.json it is float8 (e4m3).")


def _slot_of(name: str, slots: Mapping[str, Slot]) -> Slot | None:
    """Returns the slot of a tensor; checkpoints of a model without a head lack the prefix ``model.``."""
    return slots.get(name) or slots.get(f"model.{name}")


def _is_redundant(name: str, tied: bool) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight") or is_kv_scale(name)

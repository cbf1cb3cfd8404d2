"""Fills a model's slots from a source of weights, tensor by tensor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from ..api.errors import ConfigError
from .files import first_names
from .filling import Filling, FillTimes
from .kv_scales import is_kv_scale
from .lazy import LazyTensor
from .slots import Slot, end_loading, finish_loading
from .source import SourceTensor, WeightSource

Progress = Callable[[str, float], None]


def silent(stage: str, fraction: float) -> None:
    """A Progress that reports nothing."""


TensorParts = Callable[[str, LazyTensor], Iterable[tuple[str, LazyTensor]]]
"""Returns the model's tensors which a checkpoint's tensor holds, with their names. A tensor that has a name of the
model stays as it is."""

OnOtherStage = Callable[[str], bool]
"""Returns whether another pipeline stage loads the tensor of this name."""


def on_no_other_stage(name: str) -> bool:
    """Returns False: there is one stage only."""
    return False


log = logging.getLogger("baton.weights")
_SHOWN_MISFITS = 3


def load_weights(source: WeightSource, slots: Iterable[Slot], progress: Progress, *, tied: bool,
                 unused: tuple[str, ...] = (), on_other_stage: OnOtherStage = on_no_other_stage,
                 parts: TensorParts | None = None, num_threads: int = 1, times: FillTimes | None = None) -> None:
    """Copies every slot's slice from ``source`` by ``num_threads`` threads; at most one slice for each is in host
    memory besides the parameters.

    Calls ``progress("loading weights", fraction)`` after each tensor. ``tied`` permits a redundant ``lm_head.weight``,
    and ``unused`` names with these prefixes: layers of multi-token prediction, which are logged. ``on_other_stage``
    returns whether another pipeline stage loads a name. ``parts`` are those of the model's family. ``times``, where
    given, is added to.

    Raises ConfigError for tensors that are missing or of another shape, all in one, and for an unreadable file; logs a
    warning with the names of unexpected tensors.
    """
    slots_by_name = {slot.name: slot for slot in slots}
    total = sum(slot.target.numel() for slot in slots_by_name.values())
    num_unused = 0
    unexpected: list[str] = []
    misfits = Misfits(source.name, slots_by_name.values())
    with ending(slots_by_name.values()), Filling(num_threads, times) as filling:
        for name, tensor, file in _tensors(source, slots_by_name, parts):
            slot = _slot_of(name, slots_by_name)
            if slot is None:
                num_unused += name.startswith(unused)
                if not is_redundant(name, tied) and not name.startswith(unused) and not on_other_stage(name):
                    unexpected.append(name)
                continue
            if misfits.check(slot, tensor, file):
                filling.fill(slot, tensor)
                progress("loading weights", min(filling.num_values / max(total, 1), 1.0))
    if num_unused:
        log.info("%d tensors of %s are layers of multi-token prediction, which --speculative-algorithm NEXTN loads",
                 num_unused, ", ".join(unused))
    misfits.raise_any()
    finish_loading(slots_by_name.values())
    progress("loading weights", 1.0)
    if unexpected:
        log.warning("the checkpoint %s holds %s, which its architecture does not have: they are not loaded",
                    source.name, first_names(unexpected))


def check_weights(source: WeightSource, slots: Iterable[Slot], *, parts: TensorParts | None = None) -> None:
    """Raises the ConfigError that ``load_weights`` would raise; reads no tensor."""
    slots_by_name = {slot.name: slot for slot in slots}
    misfits = Misfits(source.name, slots_by_name.values())
    for name, tensor, file in _tensors(source, slots_by_name, parts):
        slot = _slot_of(name, slots_by_name)
        if slot is not None:
            misfits.check(slot, tensor, file)
    misfits.raise_any()


class Misfits:
    """What of a checkpoint does not fit the slots of a model, for one sentence."""

    def __init__(self, source: str, slots: Iterable[Slot]):
        self._source = source
        self._missing = {slot.name for slot in slots if not slot.optional}
        self._wrong: list[str] = []

    def check(self, slot: Slot, tensor: LazyTensor, file: str) -> bool:
        """Returns whether a slot's tensor fits, and all before it did."""
        self._missing.discard(slot.name)
        try:
            slot.kind.check(slot.name, tensor, slot.shape, file)
        except ConfigError as error:
            self._wrong.append(str(error).removesuffix("."))
        return not self._wrong

    def raise_any(self) -> None:
        """Raises ConfigError with the first tensors that do not fit, and those that are missing."""
        shown = self._wrong[:_SHOWN_MISFITS]
        if (more := len(self._wrong) - len(shown)) > 0:
            shown.append(f"{more} more do not fit either")
        if self._missing:
            shown.append(f"the checkpoint {self._source} lacks {first_names(self._missing)}")
        if shown:
            sentence = "; ".join(shown)
            raise ConfigError(f"{sentence[0].upper() if not self._wrong else sentence[0]}{sentence[1:]}.")


@contextmanager
def ending(slots: Iterable[Slot]) -> Iterator[None]:
    """Ends the loading of slots when the block ends or raises."""
    try:
        yield
    finally:
        end_loading(slots)


def _tensors(source: WeightSource, slots: Mapping[str, Slot],
             parts: TensorParts | None) -> Iterator[SourceTensor]:
    """Yields the source's tensors, in parts where they hold several of the model's."""
    for name, tensor, file in source.tensors([*slots.values()]):
        for own_name, part in ((name, tensor),) if parts is None else parts(name, tensor):
            yield SourceTensor(own_name, part, file)


def _slot_of(name: str, slots: Mapping[str, Slot]) -> Slot | None:
    """Returns the slot of a tensor; checkpoints of a model without a head lack the prefix ``model.``."""
    return slots.get(name) or slots.get(f"model.{name}")


def is_redundant(name: str, tied: bool) -> bool:
    """Returns whether a checkpoint's tensor belongs to no parameter; ``tied``: nor does ``lm_head.weight``."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight") or is_kv_scale(name)

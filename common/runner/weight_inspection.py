"""Looks at a rank's weights: their content, checksums, and a snapshot to compare them with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from ..api.errors import InvalidRequest
from ..distributed.tp import TPGroup
from ..weights.digest import tensor_digest
from ..weights.slots import Slot

_LOADS, _NDIM, _START, _SHAPE_AT, _MAX_DIMS = 0, 1, 2, 3, 6
"""Facts that ranks tell each other of a slice: whether it is converted, its dimensions, first index and whole shape."""


def stored_tensors(slots: Iterable[Slot]) -> Iterator[tuple[str, Slot]]:
    """Yields this rank's slots, with names that are unique: a tensor may be in several."""
    counts: dict[str, int] = {}
    for slot in slots:
        if slot.target.numel():
            number = counts[slot.name] = counts.get(slot.name, -1) + 1
            yield (f"{slot.name}#{number}" if number else slot.name), slot


def digests_of(slots: Iterable[Slot]) -> dict[str, str]:
    """Returns the digest of each slot's content."""
    return {name: tensor_digest(slot.content()) for name, slot in stored_tensors(slots)}


def read_rows(slots: Sequence[Slot], name: str, num_rows: int, world: TPGroup) -> torch.Tensor:
    """Returns the first rows of a checkpoint's tensor in float32, put together from all ranks' slices; raises
    InvalidRequest, on all of them, where it cannot be. ``slots`` are those of this rank's model."""
    own = [slot for slot in slots if slot.name in (name, f"model.{name}")]
    found = next((slot for slot in own if slot.target.numel()), None)
    facts = np.full(_SHAPE_AT + _MAX_DIMS, -1, np.int64)
    facts[_LOADS] = any(slot.load is not None for slot in own)
    if found is not None:
        facts[_NDIM], facts[_START] = len(found.shape), found.start
        facts[_SHAPE_AT:_SHAPE_AT + len(found.shape)] = found.shape
    ranks = world.gather_ints(facts)
    having = [rank for rank in range(world.size) if ranks[rank, _NDIM] >= 0]
    if not having:
        raise InvalidRequest(f"The model has no tensor {name}: use the names of its checkpoint.", param="name")
    if ranks[:, _LOADS].max() > 0:
        raise InvalidRequest(f"The server holds {name} in another form than the checkpoint's, which cannot be read "
                             "back.", param="name")
    first = ranks[having[0]]
    shape = first[_SHAPE_AT:_SHAPE_AT + first[_NDIM]].tolist()
    whole = torch.zeros(shape, dtype=torch.float32)
    # Ranks may hold the same slice (of norms, of replicated KV heads): the first of them counts.
    owners = {int(ranks[rank, _START]): rank for rank in reversed(having)}
    if found is not None and owners[found.start] == world.rank:
        content = found.content().float().cpu().reshape(_slice_shape(found))
        whole.narrow(found.dim, found.start, content.shape[found.dim]).copy_(content) if shape else whole.copy_(content)
    return world.all_reduce(whole)[:num_rows] if shape else world.all_reduce(whole)


def _slice_shape(slot: Slot) -> list[int]:
    shape = list(slot.shape)
    if shape:
        shape[slot.dim] = slot.target.shape[slot.dim]
    return shape

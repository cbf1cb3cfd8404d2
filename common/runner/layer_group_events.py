"""The ends of layer groups in a forward pass: from then on a group's pages may travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from ..forward.forward_batch import AfterGroup


class LayerGroupEvents:
    """Of a pool whose layers are grouped so: ``groups[g]`` layers are in group g."""

    def __init__(self, groups: Sequence[int], device: torch.device):
        self._ending = {last - 1: group for group, last in enumerate(accumulate(groups))}
        self._device = device

    def telling(self, after_group: AfterGroup | None) -> Callable[[int], None]:
        """What a model calls behind each layer, for ``after_group`` to be told of the groups that end by it."""
        def after_layer(layer: int) -> None:
            group = self._ending.get(layer)
            if group is None or after_group is None:
                return
            event = None
            if self._device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self._device))
            after_group(group, event)

        return after_layer
